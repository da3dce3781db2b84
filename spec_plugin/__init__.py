"""spec-plugin: lossless speculative rollouts for RL trainers, with a draft that is trained and refreshed inside the run."""

from importlib import metadata as _metadata

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import (
    LogprobProvenanceError,
    LosslessError,
    PatchError,
    SpecConfigError,
    SpecPluginError,
)
from spec_plugin.api.hookspecs import hookimpl, hookspec

try:
    __version__ = _metadata.version("spec-plugin")
except _metadata.PackageNotFoundError:  # a source tree on the path, with nothing installed
    __version__ = "0+unknown"
__all__ = [
    "LogprobProvenanceError",
    "LosslessError",
    "PatchError",
    "SpecConfig",
    "SpecConfigError",
    "SpecPluginError",
    "__version__",
    "hookimpl",
    "hookspec",
]
