"""LoRA adapters in verl's engines: where the draft's embedding and head come from, and when a sync is complete."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("verl")
from spec_plugin_verl.weights import PolicyStream, base_on_disk
from spec_plugin_verl_cpu.mappers import unstacked

from spec_plugin.api.errors import SpecPluginError
from spec_plugin.api.events import TargetInfo, WeightSync

HF = {"vocab_size": 6, "hidden_size": 4}
EMBED, HEAD = torch.randn(6, 4), torch.randn(6, 4)


def saved(folder: Path, tied: bool = False) -> TargetInfo:
    """A checkpoint of two files, with tensors of the same names and other sizes in it."""
    first = {"model.embed_tokens.weight": EMBED, "visual.embed_tokens.weight": torch.zeros(3, 4)}
    second = {"model.norm.weight": torch.ones(4)} | ({} if tied else {"lm_head.weight": HEAD})
    for i, tensors in enumerate((first, second)):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return TargetInfo(path=str(folder), hf_config=HF, dtype="float32")


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_that_the_engine_has_read_is_read_here_too(tmp_path: Path, tied: bool) -> None:
    kept = base_on_disk(saved(tmp_path, tied), torch.clone)
    assert torch.equal(kept["embed"], EMBED) and ("head" in kept) is not tied
    assert tied or torch.equal(kept["head"], HEAD)


def test_a_folder_without_the_embedding_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(SpecPluginError, match="load_format=dummy"):
        base_on_disk(TargetInfo(path=str(tmp_path), hf_config=HF, dtype="float32"), torch.clone)


def test_adapters_are_mapped_by_all_but_the_stacking() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = unstacked(WeightsMapper(orig_to_new_prefix={"a.": "b."}, orig_to_new_stacked={"q": ("qkv", "q")}))
    assert mapper.orig_to_new_prefix == {"a.": "b."} and not mapper.orig_to_new_stacked


def streams(target: TargetInfo) -> PolicyStream:
    @contextmanager
    def guarded(_reason: object, _doing: str = "") -> Any:
        yield

    return PolicyStream(SimpleNamespace(copy_of=torch.clone, target=target, failed=None, guarded=guarded))


def sync(policy: PolicyStream, step: int, tensors: dict[str, torch.Tensor], **theirs: Any) -> WeightSync | None:
    """One stream that verl sends; what is announced behind it."""
    tap = policy.tap(iter(tensors.items()), **theirs)
    assert list(tap) == list(tensors.items())
    return WeightSync(step, *tap.copies()) if policy.complete(tap, **theirs) else None


ADAPTER = {"layers.0.q_proj.lora_A.weight": torch.zeros(2, 4)}
BASE = {"model.embed_tokens.weight": EMBED, "lm_head.weight": HEAD}


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_sync_is_complete_with_its_adapters_and_carries_the_bases_embedding(tmp_path: Path, from_disk: bool) -> None:
    policy, lora = streams(saved(tmp_path)), {"peft_config": object(), "wire_format": "named_tensors"}
    if not from_disk:
        (tmp_path / "model-0.safetensors").unlink()
        assert sync(policy, 0, BASE, **lora, base_sync_done=False) is None, "the adapters are yet to come"
    for step in (0, 1):
        event = sync(policy, step, ADAPTER, **lora, base_sync_done=True)
        assert event is not None and event.policy_version == step
        assert torch.equal(event.embed, EMBED) and torch.equal(event.lm_head, HEAD)


def test_without_adapters_each_sync_brings_its_own(tmp_path: Path) -> None:
    policy = streams(saved(tmp_path))
    for shift in (0.0, 1.0):
        event = sync(policy, 0, {name: tensor + shift for name, tensor in BASE.items()}, base_sync_done=True)
        assert event is not None and torch.equal(event.embed, EMBED + shift)
