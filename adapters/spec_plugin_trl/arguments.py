"""The options as a dataclass, for scripts that read theirs with TRL's parser."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any, Optional

from spec_plugin.adapter import SpecConfig

PREFIX = "spec_"
_TEXT: Any = Optional[str]  # noqa: UP045  (the parser asks for this very form with Python 3.10)


def _option(help: str) -> Any:
    return field(default=None, metadata={"help": help.replace("%", "%%")})


_SWITCH = ("spec", str, field(default="on", metadata={"help": "Speculative rollouts; off or false: a plain run."}))
_OPTIONS = [(PREFIX + name, _TEXT, _option(info.description or name)) for name, info in SpecConfig.model_fields.items()]

#: ``TrlParser((ScriptArguments, GRPOConfig, ModelConfig, SpecArguments))`` takes ``--spec_k 5``, and ``spec_k: 5`` in its YAML
#: file; ``spec_plugin_trl.enable(arguments)`` obeys. ``--spec off`` leaves the run as it is.
SpecArguments: Any = make_dataclass("SpecArguments", [_SWITCH, *_OPTIONS])
SpecArguments.__doc__ = "Options of spec-plugin, ``spec_`` before the name; None: what the variable or the default has."
SpecArguments.__module__ = __name__
