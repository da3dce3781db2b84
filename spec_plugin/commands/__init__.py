"""What a person types: the command line, ``check``, ``doctor``, ``train``, ``report``.

Called by the ``spec-plugin`` script, a module for each command; runs in a person's shell, and nothing that a run loads imports
it.
"""
