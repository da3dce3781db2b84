"""Hydra finds the config group ``spec`` (``+spec=on`` for verl) because of this file, which every application of Hydra imports.

It adds one place to look for configs, behind all others, and imports nothing of ours: without ``+spec=…`` a configuration is what
it was.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class SpecPluginVerl(SearchPathPlugin):
    """Says where the group is."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append its folder."""
        search_path.append(provider="spec-plugin", path="pkg://spec_plugin_verl_check.conf")
