"""Targets of many families in the real engine: verified, read, drafted for and refreshed, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from refreshing import acceptance_length
from safetensors.torch import save_file
from spec_plugin_conformance.targets import tiny_targets

from draft_training import DraftConfig, digest
from draft_training.eagle3 import save_draft
from spec_plugin.trainer.decoder import find_decoder, load_policy
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

pytestmark = pytest.mark.engine
#: the others run by themselves: half a minute each
DAILY = ("qwen3_moe", "seed_oss")
#: relative error of one token's vector between transformers' forward pass and vLLM's, both in this dtype
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


@torch.no_grad()
def captured(model: Any, documents: list[torch.Tensor], config: DraftConfig) -> Any:
    """What the actor's side copies out of a forward pass of transformers."""
    taps = Taps.of(find_decoder(model), config.aux_layers)
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
    with taps.attached():
        model(input_ids=padded, attention_mask=attention, use_cache=False)
    return harvested(taps, (documents, responses_at_the_end(documents, [1] * len(documents))), HarvestPlan(1 << 20))


@contextmanager
def engine_states(llm: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What vLLM's model hands to the draft: [N, A * H] and [N, H] of each of its forward passes."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(_model: Any, _args: Any, output: Any) -> None:
        last, aux = output
        kept.append((torch.cat(list(aux), dim=-1).clone(), last.clone()))

    handle = runner.model.register_forward_hook(hook)
    try:
        yield kept
    finally:
        handle.remove()


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def the_states_are_the_actors(llm: Any, model: Any, config: DraftConfig, tolerance: float) -> None:
    for prompt in small.PROMPTS:
        with engine_states(llm) as kept:
            small.generate_one(llm, prompt)
        aux, last = kept[0]
        mine = captured(model, [torch.tensor(prompt)], config)
        n = len(prompt)
        errors = [off(aux[:n], mine.aux), off(last[:n], mine.last)]
        assert max(errors) < tolerance, errors
        logits = mine.last @ model.get_output_embeddings().weight.T
        assert logits.argmax(-1).tolist() == model(input_ids=torch.tensor([prompt])).logits[0].argmax(-1).tolist()


def drafted_for(family: str, folder: Path) -> None:
    """The same text as transformers with a random draft, and with a good one; the draft reads what the actor harvests."""
    room = tiny_targets()[family]
    os.environ.update(room.environment)
    target = small.make_target(folder / "target", family)
    model = load_policy(target, getattr(torch, room.dtype))
    reference = small.reference(target, model)
    config, draft = small.draft_config(target), folder / "draft"
    dtype = getattr(torch, room.dtype)
    save_draft(draft, config, small.draft_tensors(config, seed=1, dtype=dtype))
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if room.more else {}
    options["dtype"] = room.dtype
    llm = small.start_engine(target, draft, **options)
    assert small.greedy(llm) == reference and acceptance_length(llm) < 1.5
    the_states_are_the_actors(llm, model, config, TOLERANCE[room.dtype])
    tensors = {name: tensor.to(dtype) for name, tensor in small.good_tensors(config).items()}
    save_file(tensors, folder / "draft.safetensors")
    report = small.rpc(llm, "spec_install_file", str(folder / "draft.safetensors"), 1, digest(tensors), list(tensors))
    assert report["installed"], report
    length = acceptance_length(llm)
    assert small.greedy(llm) == reference and length > 3.0, length
    print(f"{family}: acceptance length {length:.2f} of 4, text and states as transformers'")


@pytest.mark.parametrize(
    "family",
    [name if name in DAILY else pytest.param(name, marks=pytest.mark.family) for name in sorted(tiny_targets())],
)
def test_a_family_is_drafted_for_and_says_what_it_says_in_transformers(
    family: str, tmp_path: Path, warm_python: str
) -> None:
    """In a process of its own: vLLM makes the groups that experts need only where the first engine of a process has some."""
    if missing := tiny_targets()[family].missing:
        pytest.skip(f"needs {', '.join(missing)}")
    roots = (Path(__file__).parent, Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])}
    command = [warm_python, __file__, family, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    drafted_for(sys.argv[1], Path(sys.argv[2]))
