"""What the verl adapter takes and refuses, without verl: importing ``spec_plugin_verl`` is the flag, importing this does nothing.

``spec-plugin check verl`` calls ``check.check``; the run itself refuses with the same ``options.objections``. ``spec-plugin
doctor`` asks ``doctor.DOCTOR``.
"""
