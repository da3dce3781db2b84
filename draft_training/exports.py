"""Writing EAGLE-3 drafts for others: which config.json and which tensor names vLLM, SGLang and speculators load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from draft_training.checkpoint import replacing_folder, write_json, write_tensors
from draft_training.config import DraftConfig
from draft_training.eagle3 import Eagle3Kind
from draft_training.errors import DraftConfigError
from draft_training.files import weight_files
from draft_training.outside import short_repr
from draft_training.weights import read_tensors

#: of ``DraftConfig.to_hf`` what describes the draft and not its one decoder layer; speculators keeps the two apart
_OF_THE_DRAFT = (
    "architectures",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "num_aux_hidden_states",
)


@dataclass(frozen=True)
class Verifier:
    """The target as a speculators checkpoint names it: speculators loads embedding, head and last norm from there."""

    name: str  # a folder, or OWNER/NAME of the hub
    architectures: Sequence[str]  # as in its config.json


def kind_named(hf: Mapping[str, Any]) -> str:
    """What a draft's config.json says that it is, if that is no EAGLE-3; empty: nothing else is said."""
    named = hf.get("speculators_model_type") or hf.get("architectures") or "eagle3"
    return "" if "eagle3" in str(named).lower() else short_repr(named)


def for_vllm(config: DraftConfig) -> dict[str, Any]:
    """config.json for vLLM with ``{"method": "eagle3", "model": <the folder>}``."""
    return config.to_hf()


def for_sglang(config: DraftConfig) -> dict[str, Any]:
    """config.json for SGLang with ``--speculative-algorithm EAGLE3``; vLLM reads it, too.

    SGLang takes auxiliary layers from ``eagle_config`` alone, as the layers whose output they are, where vLLM names the layers
    that they enter. It shares the target's head only where ``draft_vocab_size`` is null.

    Raises:
        DraftConfigError: for a draft that SGLang would compute differently.
    """
    if config.norm_before_residual:
        raise DraftConfigError(
            "SGLang has no norm_before_residual, which this draft sets: it would compute other hidden states; export it for vllm "
            "or speculators"
        )
    if 0 in config.aux_layers:
        raise DraftConfigError(
            f"the draft reads what enters layers {list(config.aux_layers)}, and SGLang names layers by their output, which what "
            "enters layer 0 is not; export it for vllm or speculators"
        )
    outputs = [layer - 1 for layer in config.aux_layers]
    return {
        **config.to_hf(),
        "draft_vocab_size": config.draft_vocab_size if config.pruned else None,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
    }


def for_speculators(config: DraftConfig, verifier: Verifier, k: int) -> dict[str, Any]:
    """config.json for ``SpeculatorModel.from_pretrained``, and for ``vllm serve <the folder>``, which reads the target from it.

    Args:
        config: the draft's.
        verifier: its target.
        k: tokens that vLLM drafts if nobody says otherwise.
    """
    whole = config.to_hf()
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {name: value for name, value in whole.items() if name not in _OF_THE_DRAFT},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "tie_word_embeddings": False,
    }


def target_head(folder: Path, config: DraftConfig) -> Tensor:
    """The target's LM head, [V, H] as it is stored: its own, or its embedding where it has none.

    speculators takes the head of a draft from the draft's own file and has random numbers where that lacks it, so that a draft
    with the whole vocabulary needs it there (0.9.0; the embedding it takes from the target).

    Args:
        folder: of the target's weights.
        config: the draft's, which says how large the head is.

    Raises:
        DraftConfigError: if there is no such tensor.
        CheckpointError: if a file is torn.
    """
    shape = (config.vocab_size, config.hidden_size)
    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for file in weight_files(folder):
            found = read_tensors(file, partial(_ends_with, ending))
            if heads := [tensor for _, tensor in sorted(found.items()) if tuple(tensor.shape) == shape]:
                return heads[0]
    raise DraftConfigError(
        f"{folder} holds no LM head or embedding of {list(shape)} in *.safetensors, which a speculators draft with the whole "
        "vocabulary needs: give the folder of the target's weights"
    )


def _ends_with(ending: str, name: str) -> bool:
    return name.endswith(ending)


def write_export(
    path: str | Path,
    config: DraftConfig,
    hf: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    head: Tensor | None = None,
) -> None:
    """Write config.json and model.safetensors into a new folder, all or nothing.

    Args:
        path: the folder.
        config: the draft's, which the tensors must match.
        hf: its config.json, of one of the functions above.
        tensors: as ``load_draft`` returns them.
        head: [V, H] the target's LM head, to lie beside them; see ``target_head``.

    Raises:
        DraftConfigError: if names or shapes of the tensors do not match.
    """
    Eagle3Kind(config).check(tensors)
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    layer = "layers.0." if "speculators_model_type" in hf else "midlayer."
    written = {name.replace("midlayer.", layer, 1): tensor for name, tensor in tensors.items()}
    if head is not None:
        written["lm_head.weight"] = head.to(dtype)
    with replacing_folder(path) as folder:
        write_json(folder / "config.json", {**hf, "torch_dtype": str(dtype).removeprefix("torch.")})
        write_tensors(folder / "model.safetensors", written)
