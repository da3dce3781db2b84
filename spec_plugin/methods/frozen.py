"""The frozen method: any draft that vLLM loads, served as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.files import check_offsets, read_json
from draft_training.outside import ModelBasics, is_size, read
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.methods.checkpoints import tensor_names, vocabulary_map
from spec_plugin.methods.damage import refuse_damaged
from spec_plugin.methods.sample_method import draft_sample_method
from spec_plugin.methods.served import INSTEAD
from spec_plugin.methods.tables import common_settings, refuse_options_of_a_shape
from spec_plugin.plan.engine_class import refuse_unreadable
from spec_plugin.plan.model_runner import leaves_a_draft_unread
from spec_plugin.plan.refusals import refusing

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
        refuse_options_of_a_shape(config, "a draft that is served as it is")
        kind, parallel = kind_of(Path(config.draft))
        hf = _as_vllm_reads(Path(config.draft))
        if kind in ("eagle3", "dflash"):
            refuse_unreadable(target.hf_config, False, INSTEAD)
        with refusing(f"spec.draft={config.draft!r} cannot be served"):
            _refuse_strange_tokens(config.draft, hf, target)
            refuse_damaged(Path(config.draft), kind, hf)
        if kind == "draft_model" and target.load_format == "dummy":
            raise SpecConfigError(
                f"spec.draft={config.draft!r} is a whole model, which vLLM initialises at random under load_format=dummy: set "
                "the engine's load_format to auto, or spec.method=draft_model, which sends its weights"
            )
        settings: dict[str, Any] = {
            "method": kind,
            **common_settings(config, target, all_or_nothing_k=parallel and kind != "dflash"),
            "draft_sample_method": draft_sample_method(config, target, kind),
        }
        if kind != "draft_model":
            settings["draft_load_config"] = {"load_format": "auto"}
        if parallel and kind != "dflash":  # of which vLLM knows by itself
            settings["parallel_drafting"] = True
        if leaves_a_draft_unread(target.load_format, settings, target.device_type):
            raise SpecConfigError(
                f"spec.draft={config.draft!r} under load_format=dummy: the installed vLLM's V2 model runner then leaves the "
                "draft's file unread and would draft with noise, since a frozen draft is never sent: set the engine's "
                "load_format to auto, or VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
            )
        folder = config.draft
        return Method(
            "frozen",
            settings,
            lambda: _verified_folder(folder),
            hf_config=hf,
            pretrained=True,
            all_or_nothing_k="parallel_drafting" in settings,
        )


def _verified_folder(draft: str) -> str:
    """The draft's folder, once its numbers have been looked at: they are not read before the engine is about to.

    Raises:
        SpecConfigError: if a number in it is not finite, or a file is torn.
    """
    from draft_training.weights import refuse_broken, refuse_broken_mask

    with refusing(f"spec.draft={draft!r} cannot be served"):
        for file in sorted(Path(draft).glob("*.safetensors")):
            refuse_broken(file)
        refuse_broken_mask(Path(draft))
    return draft


def _refuse_strange_tokens(draft: str, hf: Mapping[str, Any], target: TargetInfo) -> None:
    """A pruned draft whose tokens are not all the target's: on a card the engine would die of the first of them."""
    vocabulary = read(ModelBasics, target.hf_config, target.file).vocab_size
    offsets, size = vocabulary_map(Path(draft)), hf.get("draft_vocab_size")
    if offsets is None or vocabulary is None:
        return
    check_offsets(offsets, vocabulary, draft, distinct=False)
    if is_size(size) and len(offsets) != size:
        raise DraftConfigError(
            f"d2t in {draft} has {len(offsets)} tokens, but config.json says draft_vocab_size={size}; export the draft again"
        )


def _as_vllm_reads(folder: Path) -> dict[str, Any]:
    """config.json of a draft; of speculators' layout the decoder's part, with what vLLM takes of the whole beside it.

    Where the longest text is left out vLLM reads it as of Llama's class, which says 2048.

    Raises:
        SpecConfigError: if it cannot be read.
    """
    with refusing(f"spec.draft={str(folder)!r} cannot be read"):
        hf = read_json(folder / "config.json")
    if isinstance(layer := hf.get("transformer_layer_config"), Mapping):
        kind = {"llama": "Eagle3LlamaForCausalLM"}.get(str(layer.get("model_type", "llama")), "")
        of_vllm = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "quantization_config")
        hf = {**layer, **{name: hf.get(name) for name in of_vllm}, "architectures": [kind]}
    return {**({"max_position_embeddings": 2048} if hf.get("model_type") == "llama" else {}), **hf}


def kind_of(folder: Path) -> tuple[str, bool]:
    """vLLM's method for a draft, and whether it drafts all tokens in one pass.

    Raises:
        SpecConfigError: if the folder holds no draft that can be told.
    """
    with refusing(f"spec.draft={str(folder)!r} cannot be read"):
        hf = read_json(folder / "config.json")
        architecture = (read(ModelBasics, hf, str(folder / "config.json")).architectures or [""])[0]
        names = tensor_names(folder)
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
