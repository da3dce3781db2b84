"""spec-plugin's adapter for TRL: ``SPEC_PLUGIN_TRL=1 <your usual command>``, or ``python -m spec_plugin_trl script.py …``.

Options: ``SPEC_PLUGIN_TRL="k=5 train_share=0.3"``. Importing this package does nothing.
"""
