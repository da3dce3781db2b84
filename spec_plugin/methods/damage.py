"""Is a draft that is served as it is whole: read from headers alone, since vLLM would not say.

Its loaders of EAGLE drafts tell nobody what they loaded (0.24 to 0.33), so that a missing tensor stays as it was in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.files import opened, weight_files
from draft_training.outside import Eagle3, EagleConfig, is_size, read

#: kinds of numbers by safetensors' names that weights may have, and what may have others
_WEIGHTS, _NO_WEIGHTS = ("F64", "F32", "F16", "BF16"), ("d2t", "t2d", "draft_id_to_target_id", "position_ids")
Shape = tuple[int, ...]


def refuse_damaged(folder: Path, kind: str, config: Mapping[str, Any]) -> None:
    """Refuse missing files and tensors, and such of another shape or kind than config.json says.

    Args:
        folder: the draft's.
        kind: vLLM's method for it.
        config: its config.json, as vLLM takes it apart. Of a quantized draft, and of layers that are not Llama's, the files
            alone are looked at.

    Raises:
        DraftConfigError: naming the first that is wrong.
        CheckpointError: if a file is missing or torn.
    """
    quantized, shapes = bool(config.get("quantization_config")), dict[str, Shape]()
    for file in weight_files(folder):
        with opened(file, "numpy") as f:
            for name, part in ((name, f.get_slice(name)) for name in f.keys()):  # noqa: SIM118 (not a dict)
                if part.get_dtype() not in _WEIGHTS and not quantized and not name.endswith(_NO_WEIGHTS):
                    raise DraftConfigError(
                        f"{name} in {file} is {part.get_dtype()}: expected F32, BF16 or F16; export the draft again"
                    )
                shapes[name.removeprefix("model.")] = tuple(part.get_shape())
    if quantized or kind not in ("eagle", "eagle3") or "Llama" not in str(config.get("architectures")):
        return
    for name, expected in _expected(config, str(folder / "config.json"), kind == "eagle3", shapes):
        if (found := shapes.get(name)) != expected:
            raise DraftConfigError(
                f"{folder} lacks {name}, which vLLM would leave as it is in memory: export the draft again"
                if found is None
                else f"{name} in {folder} has shape {list(found)}, but config.json implies {list(expected)}: correct one of them"
            )


def _expected(
    config: Mapping[str, Any], where: str, third: bool, found: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of an EAGLE-1 or EAGLE-3 draft, the latter's first layer over embedding and state."""
    fields = read(Eagle3, config, where)
    nested = read(EagleConfig, fields.eagle_config, where)
    h, m, (heads, kv_heads, d) = fields.hidden_size, fields.intermediate_size, fields.heads
    states = config.get("num_aux_hidden_states") or len(nested.eagle_aux_hidden_state_layer_ids) or 3
    if not third:
        yield "fc.weight", (h, 2 * h)
    elif nested.use_aux_hidden_state and is_size(states):
        yield "fc.weight", (h, states * (fields.target_hidden_size or h))
        yield "norm.weight", (h,)
    for at in range(fields.num_hidden_layers or 1):
        prefix = f"layers.{at}." if at or any(name.startswith("layers.0.") for name in found) else "midlayer."
        yield f"{prefix}post_attention_layernorm.weight", (h,)
        yield f"{prefix}self_attn.o_proj.weight", (h, heads * d)
        yield f"{prefix}mlp.down_proj.weight", (h, m)
        if f"{prefix}self_attn.qkv_proj.weight" not in found:
            for one, many in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                yield f"{prefix}self_attn.{one}_proj.weight", (many * d, 2 * h if third and not at else h)
        if f"{prefix}mlp.gate_up_proj.weight" not in found:
            yield from ((f"{prefix}mlp.{one}_proj.weight", (m, h)) for one in ("gate", "up"))
