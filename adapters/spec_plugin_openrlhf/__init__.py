"""spec-plugin's adapter for OpenRLHF: ``python -m spec_plugin_openrlhf <flags of openrlhf.cli.train_ppo_ray> --spec.enable``.

OpenRLHF's parser refuses unknown flags and it has no plugin mechanism, hence a launcher. Importing this package does nothing.
"""
