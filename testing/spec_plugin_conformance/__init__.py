"""The conformance kit: contract tests that any adapter must pass, against its real trainer and a real engine.

``pytest -p spec_plugin_conformance --adapter NAME`` runs it; so does ``spec-plugin conformance NAME``. Nothing is imported
here, because the recorder is loaded in every process of the trainer, and those need no pytest.
"""

pytest_plugins = ["spec_plugin_conformance.plugin"]
