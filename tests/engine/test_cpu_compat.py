"""Law 2 on vLLM's CPU build: the repairs are effective in the running engine, and still needed."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
from spec_plugin_cpu.repairs import compat as cpu_compat
from spec_plugin_cpu.repairs.drafts_0_24 import DRAFTS_0_24
from spec_plugin_cpu.repairs.norms import NORMS

from spec_plugin.engine.vllm.repairs import on_cpu, patches

pytestmark = pytest.mark.engine

EXPAND = cpu_compat.CPU_PATCHES[0]
#: of gated delta nets and of vLLM 0.24: processor and version decide
OF_STATES = ("dense_state_indices", "drafted_convolution", "prompt_convolution")
ALWAYS = ("expand_kernel", "live_weights", "stacked_norms", "drawn_proposals")
NOT_EVERYWHERE = (*OF_STATES, *(patch.name for patch in DRAFTS_0_24))

WITHOUT_REPAIR = """
import json, sys
from pathlib import Path
import small
from test_cpu_compat import nan_share
llm = small.start_engine(Path(sys.argv[1]), Path(sys.argv[2]),
                        additional_config={"spec_plugin": {"skip_patches": ["expand_kernel"]}})
patches = {p["name"]: p["state"] for p in small.rpc(llm, "spec_draft_info")["patches"]}
print("RESULT " + json.dumps([nan_share(llm), patches]))
"""


def nan_share(llm: Any) -> float:
    """Share of sampled tokens whose log-prob is not a number, at temperature 1."""
    values = [next(iter(step.values())).logprob for o in small.generate(llm, 1.0, logprobs=0) for step in o.logprobs]
    return sum(math.isnan(v) for v in values) / len(values)


def sampler_expands_right() -> bool:
    """True if the rejection sampler that this process uses expands per-request values correctly, patched or not."""
    from vllm.v1.sample import rejection_sampler

    got = rejection_sampler.expand_batch_to_tokens(
        torch.tensor([0.7, 0.0]), torch.tensor([3, 5], dtype=torch.int32), 5, replace_from=0, replace_to=1
    )
    return torch.equal(got, torch.tensor([0.7, 0.7, 0.7, 1.0, 1.0]))


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu():
    if not on_cpu.on_cpu():
        pytest.skip("repairs of the CPU build")


def test_the_repairs_are_in_force_in_the_worker(llm):
    states = {p["name"]: p["state"] for p in small.rpc(llm, "spec_draft_info")["patches"]}
    for name in NOT_EVERYWHERE:
        assert states.pop(name) in ("in force", "not needed")
    assert states == dict.fromkeys(ALWAYS, "in force")


def test_the_running_rejection_sampler_expands_right(llm):
    assert sampler_expands_right()


def test_log_probs_are_finite_at_temperature_one(llm):
    assert nan_share(llm) == 0.0


def test_without_the_repair_the_running_engine_samples_garbage(llm):
    patches.revert(EXPAND)
    try:
        share = nan_share(llm)
        wrong = not sampler_expands_right()
    finally:
        patches.apply(EXPAND)
    print(f"\nNaN log-probs without the repair: {share:.0%}")
    assert wrong and share > 0.2
    assert nan_share(llm) == 0.0


def test_the_repair_can_be_left_out_by_an_engine_option_and_is_still_needed(target, draft, warm_python):
    """When this fails because nothing is NaN, vLLM has fixed issue 55005 and the patch can go."""
    here = Path(__file__).parent
    done = subprocess.run(
        [warm_python, "-c", WITHOUT_REPAIR, str(target), str(draft)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    share, states = json.loads(lines[0].removeprefix("RESULT "))
    for name in NOT_EVERYWHERE:
        states.pop(name)
    assert states == dict.fromkeys(ALWAYS, "in force") | {"expand_kernel": "skipped"}
    assert share > 0.2


@pytest.mark.parametrize("processed", [True, False], ids=["as verl syncs", "load_weights alone"])
def test_the_targets_weights_can_be_changed_in_the_running_engine(llm, greedy_reference, processed):
    """A weight sync must reach layers that compute with packed copies, whether or not the trainer processes them again."""

    def load(worker: Any, weight: Any) -> Any:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model, name = worker.model_runner.get_model(), "model.layers.0.mlp.down_proj.weight"
        before = dict(model.named_parameters())[name].detach().clone()
        model.load_weights([(name, before * 5000.0 if weight is None else weight)])
        if processed:
            process_weights_after_loading(model, worker.model_config, torch.device("cpu"))
        return before

    before = small.rpc(llm, load, None)
    changed = small.greedy(llm)
    small.rpc(llm, load, before)
    assert changed != greedy_reference
    assert small.greedy(llm) == greedy_reference


def context_keys(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Keys [L, T, heads, D] of the context, as vLLM's DFlash draft norms them for its L layers with their weights [L, D]."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    draft = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    return DFlashQwen3Model._normalize_context_k(draft, x)


def test_a_draft_of_several_layers_norms_its_context_with_the_weights_of_each(llm):
    """When the last line fails, vLLM has repaired it and the patch can go."""
    x, weights = torch.randn(3, 5, 2, 32), torch.rand(3, 32) + 0.5
    want = torch.nn.functional.rms_norm(x, (32,), eps=1e-6) * weights[:, None, None]
    torch.testing.assert_close(context_keys(x, weights), want)
    patches.revert(NORMS[0])
    try:
        without = context_keys(x, weights)
    finally:
        patches.apply(NORMS[0])
    assert (without[1:] - want[1:]).abs().max() > 0.1


def test_an_engine_with_a_lossy_setting_does_not_start(llm):
    from spec_plugin.api.errors import SpecConfigError
    from spec_plugin.engine.vllm.extension import SpecWorkerExtension

    config = llm.llm_engine.vllm_config
    lossy = copy.copy(config.speculative_config)
    lossy.rejection_sample_method = "synthetic"
    fake = SimpleNamespace(speculative_config=lossy, device_config=config.device_config, additional_config={})
    with pytest.raises(SpecConfigError, match="synthetic"):
        SpecWorkerExtension(vllm_config=fake)


@pytest.mark.parametrize("first", ["ours", "the trainer's"])
def test_a_trainers_extension_may_stand_on_either_side(llm, first):
    from vllm.config import set_current_vllm_config

    from spec_plugin.engine.vllm.extension import SpecWorkerExtension

    seen = {}

    class Trainer:  # as verl's: reads vllm_config, passes nothing on
        def __new__(cls, **kwargs):
            seen.update(kwargs)
            return super().__new__(cls)

    bases = (SpecWorkerExtension, Trainer) if first == "ours" else (Trainer, SpecWorkerExtension)
    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config):
        worker = type("Both", bases, {"__init__": lambda self, **kwargs: None})(vllm_config=config)
    assert seen["vllm_config"] is config and worker._spec_state.served.version == -1


def test_counters_are_cumulative(llm):
    from spec_plugin.engine.vllm.schedule.counters import read_spec_counters

    before = read_spec_counters()
    small.greedy(llm)
    after = read_spec_counters()
    assert after["drafts"] > before["drafts"] and len(after["accepted_per_pos"]) == 3
    assert after["draft_tokens"] - before["draft_tokens"] <= 3 * (after["drafts"] - before["drafts"])
    assert sum(after["accepted_per_pos"]) == after["accepted_tokens"]


def test_every_capability_is_found_on_the_installed_vllm():
    from spec_plugin.engine.vllm.capabilities import probe_vllm

    missing = {found.name: found.detail for found in probe_vllm() if found.state != "ok"}
    assert set(missing) <= {"sleep mode"}, missing
