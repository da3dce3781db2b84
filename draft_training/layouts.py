"""Reading EAGLE-3 checkpoints of other makers: tensor names and configs of vLLM, EAGLE, NVIDIA and speculators."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draft_training.config import DraftConfig
from draft_training.errors import DraftConfigError
from draft_training.files import check_offsets
from draft_training.outside import DRAFT, TARGET, Speculators, Stack, read, short_repr

logger = logging.getLogger(__name__)

_DROPPED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


def read_config(
    hf: Mapping[str, Any],
    target_config: Mapping[str, Any] | None,
    where: str = DRAFT,
    target_file: str = TARGET,
) -> DraftConfig:
    """A draft's config.json in vLLM's layout (EAGLE's and NVIDIA's, too) or that of speculators.

    Args:
        hf: the parsed config.json.
        target_config: the target's, needed only if ``hf`` names no auxiliary layers.
        where: the file of ``hf``, for the messages.
        target_file: that of ``target_config``.

    Raises:
        DraftConfigError: if the draft cannot be trained, see ``DraftConfig.from_hf``.
    """
    layers = None if target_config is None else read(Stack, target_config, target_file).num_hidden_layers
    if hf.get("speculators_model_type") is None:
        return DraftConfig.from_hf(hf, target_layers=layers, where=where)
    outer = read(Speculators, hf, where)
    if outer.speculators_model_type != "eagle3":
        raise DraftConfigError(
            f"speculators_model_type={short_repr(outer.speculators_model_type)} in {where}: only 'eagle3' drafts can be trained"
        )
    layer = dict(outer.transformer_layer_config)
    if layer.get("model_type", "llama") != "llama":
        raise DraftConfigError(
            f"transformer_layer_config.model_type={short_repr(layer['model_type'])} in {where}: only 'llama' decoder "
            "layers can be trained"
        )
    of_the_draft = ("norm_before_fc", "fc_norm", "norm_output", "target_hidden_size", "quantization_config")
    own = {k: hf.get(k) for k in of_the_draft}
    own["norm_before_residual"] = hf.get("norm_before_residual", True)  # vLLM's reading of a missing key
    own["draft_vocab_size"] = hf.get("draft_vocab_size")
    own["eagle_aux_hidden_state_layer_ids"] = hf.get("eagle_aux_hidden_state_layer_ids")
    layer.pop("architectures", None)
    return DraftConfig.from_hf({**layer, **own}, target_layers=layers, where=where)


def canonical_tensors(config: DraftConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under vLLM's names, without those that the target owns.

    Args:
        config: the draft's.
        tensors: as stored: with or without a ``model.`` prefix, the layer as ``midlayer`` or ``layers.0``.

    Raises:
        DraftConfigError: for fused projections, for one that is there twice, and for a map of what is no token of the target.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
        if "qkv_proj" in key or "gate_up_proj" in key:
            raise DraftConfigError(
                f"{name} is a fused projection, whose row order differs between makers; export it split as "
                "q_proj, k_proj, v_proj, gate_proj, up_proj"
            )
        if key.endswith(_DROPPED):
            continue
        key = "d2t" if key == "draft_id_to_target_id" else key
        if key in renamed:
            raise DraftConfigError(f"{name} is in the draft twice, under two names of {key}; remove one of them")
        renamed[key] = tensor
    if not config.pruned:
        if renamed.pop("lm_head.weight", None) is not None:
            logger.warning(
                "the draft's own lm_head is dropped: a draft with the full vocabulary uses the policy's head"
            )
        renamed.pop("d2t", None)
        renamed.pop("t2d", None)
    elif "d2t" in renamed:
        check_offsets(renamed["d2t"], config.vocab_size, "the draft")
        implied = t2d_from_d2t(renamed["d2t"], config.vocab_size)
        if not renamed.get("t2d", implied).bool().equal(implied):
            logger.warning("the draft's t2d contradicts its d2t and is rebuilt from it: the engine reads d2t alone")
        renamed["t2d"] = implied
    return renamed


def t2d_from_d2t(d2t: Tensor, vocab_size: int) -> Tensor:
    """[V] bool, True where a target id has a draft id (d2t: [Vd] int64 offsets)."""
    mask = d2t.new_zeros(vocab_size, dtype=d2t.bool().dtype)
    mask[d2t.new_ones(d2t.numel()).cumsum(0) - 1 + d2t] = True
    return mask
