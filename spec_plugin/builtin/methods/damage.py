"""Is a draft that is served as it is whole: what vLLM would leave as it found it in memory, or die of, read from headers alone.

vLLM's loaders of EAGLE drafts miss no tensor (0.24 to 0.33: their ``load_weights`` tell nobody what they loaded), and
take numbers of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.files import opened, weight_files
from draft_training.outside import Eagle3, EagleConfig, is_size, read

#: kinds of numbers by safetensors' names that weights may have; of a quantized draft config.json says so
_WEIGHTS = ("F64", "F32", "F16", "BF16")
_NO_WEIGHTS = ("d2t", "t2d", "draft_id_to_target_id", "position_ids")
Shape = tuple[int, ...]


def refuse_damaged(folder: Path, kind: str, config: Mapping[str, Any]) -> None:
    """Refuse missing files and tensors, and such of another shape or kind than config.json says.

    Shapes are those of Llama's layers; of other architectures, whole models and DFlash only the kind of numbers is known.

    Args:
        folder: the draft's.
        kind: vLLM's method for it.
        config: its config.json, as vLLM takes it apart.

    Raises:
        DraftConfigError: naming the first that is wrong.
        CheckpointError: if a file is missing or torn.
    """
    quantized = bool(config.get("quantization_config") or config.get("compression_config"))
    shapes: dict[str, Shape] = {}
    for file in weight_files(folder):
        with opened(file, "numpy") as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                part = f.get_slice(name)
                if part.get_dtype() not in _WEIGHTS and not quantized and not name.endswith(_NO_WEIGHTS):
                    raise DraftConfigError(
                        f"{name} in {file} is {part.get_dtype()}: expected F32, BF16 or F16, or a quantization_config in "
                        "config.json; export the draft again"
                    )
                shapes[name.removeprefix("model.")] = tuple(part.get_shape())
    llama = "Llama" in str((config.get("architectures") or [""])[0])
    if quantized or not llama or kind not in ("eagle", "eagle3"):
        return
    where = str(folder / "config.json")
    for name, expected in _expected(read(Eagle3, config, where), config, kind == "eagle3", shapes):
        if name not in shapes:
            raise DraftConfigError(
                f"{folder} lacks {name}, which vLLM would leave as it is in memory: export the draft again"
            )
        if expected and shapes[name] != expected:
            raise DraftConfigError(
                f"{name} in {folder} has shape {list(shapes[name])}, but config.json implies {list(expected)}: correct that, or "
                "export the draft again"
            )


def _expected(
    fields: Eagle3, config: Mapping[str, Any], third: bool, found: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of an EAGLE-1 or EAGLE-3 draft, the latter's first layer over embedding and state."""
    h, m, (heads, kv_heads, d) = fields.hidden_size, fields.intermediate_size, fields.heads
    nested = read(EagleConfig, fields.eagle_config, "eagle_config")
    if not third:
        yield "fc.weight", (h, 2 * h)
    elif nested.use_aux_hidden_state:
        states = config.get("num_aux_hidden_states") or len(nested.eagle_aux_hidden_state_layer_ids) or 3
        yield "fc.weight", (h, states * (fields.target_hidden_size or h)) if is_size(states) else ()
        yield "norm.weight", (h,)
    for at in range(fields.num_hidden_layers or 1):
        prefix = f"layers.{at}." if at or any(name.startswith("layers.0.") for name in found) else "midlayer."
        width = 2 * h if third and not at else h
        yield f"{prefix}post_attention_layernorm.weight", (h,)
        for one in ("q", "k", "v") if f"{prefix}self_attn.qkv_proj.weight" not in found else ():
            yield f"{prefix}self_attn.{one}_proj.weight", ((heads if one == "q" else kv_heads) * d, width)
        yield f"{prefix}self_attn.o_proj.weight", (h, heads * d)
        for one in ("gate", "up") if f"{prefix}mlp.gate_up_proj.weight" not in found else ():
            yield f"{prefix}mlp.{one}_proj.weight", (m, h)
        yield f"{prefix}mlp.down_proj.weight", (h, m)
