"""The frozen method: any draft that vLLM loads, served as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_plugin.builtin.methods.checkpoints import tensor_names
from spec_plugin.builtin.methods.tables import common_settings
from spec_plugin.config import SpecConfig
from spec_plugin.errors import SpecConfigError
from spec_plugin.events import TargetInfo
from spec_plugin.hookspecs import hookimpl
from spec_plugin.method import Method

#: what a parallel draft's config.json has, and no other's: the token that stands for those that are not known yet
_PARALLEL = ("pard_token", "ptd_token_id", "mask_token_id")


class FrozenMethod:
    """EAGLE-1, EAGLE-3 of any shape, P-EAGLE, DFlash, or a whole model; nothing is harvested, trained or refreshed.

    What such a draft shares with the target follows the policy; the rest stays what it was, and grows stale.
    """

    @hookimpl(trylast=True)
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """Asked last, with ``spec.train=false``: for a draft that its own method could neither train nor send.

        Raises:
            SpecConfigError: naming what the folder lacks.
        """
        if config.method != "frozen" and (config.draft is None or config.train):
            return None
        if config.train or config.draft is None:
            raise SpecConfigError(
                "spec.method='frozen' serves a draft as it is: set spec.draft=FOLDER and spec.train=false"
            )
        kind, parallel = kind_of(Path(config.draft))
        if kind == "draft_model" and target.load_format == "dummy":
            raise SpecConfigError(
                f"spec.draft={config.draft!r} is a whole model, of which vLLM makes noise with load_format=dummy: set the "
                "engine's load_format to auto, or spec.method=draft_model, which sends it"
            )
        settings: dict[str, Any] = {
            "method": kind,
            **common_settings(config, target, whole=parallel and kind != "dflash"),
            "draft_sample_method": config.draft_sample_method,
        }
        if kind != "draft_model":
            settings["draft_load_config"] = {"load_format": "auto"}
        if parallel and kind != "dflash":  # of which vLLM knows by itself
            settings["parallel_drafting"] = True
        whole = bool(settings.get("parallel_drafting"))
        return Method("frozen", settings, model=lambda: config.draft, ready=True, whole=whole)


def kind_of(folder: Path) -> tuple[str, bool]:
    """vLLM's method for a draft, and whether it drafts all tokens in one pass.

    Raises:
        SpecConfigError: if the folder holds no draft that can be told.
    """
    try:
        hf: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
        architecture = str((hf.get("architectures") or [""])[0])
        names = tensor_names(folder)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"spec.draft={str(folder)!r} cannot be read: {error}") from error
    parallel = any(hf.get(name) is not None for name in _PARALLEL)
    if "DFlash" in architecture:
        return "dflash", True
    if "Eagle3" in architecture:
        return "eagle3", parallel
    if any(name.removeprefix("model.") == "fc.weight" for name in names):
        return "eagle", parallel  # EAGLE-1: one layer behind a projection of embedding and last state
    if any("embed_tokens" in name for name in names):
        return "draft_model", parallel
    raise SpecConfigError(
        f"spec.draft={str(folder)!r}: architectures={hf.get('architectures')} is no draft that is known here (EAGLE-1, EAGLE-3, "
        "P-EAGLE, DFlash, a causal LM)"
    )
