"""spec-plugin: lossless speculative rollouts for RL trainers, with a draft that is trained and refreshed inside the run."""

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import (
    LogprobProvenanceError,
    LosslessError,
    PatchError,
    SpecConfigError,
    SpecPluginError,
)
from spec_plugin.api.hookspecs import hookimpl, hookspec

__version__ = "0.1.0"
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
