"""One engine of OpenRLHF, with its own actor class, asleep and paused as the trainer leaves it; see ``test_openrlhf_engine``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from spec_plugin_openrlhf_cpu import setup_worker

from draft_training import DraftTrainer, TrainSettings, digest
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import DraftRefresh, Schedule, SelfTestReport, TargetInfo
from spec_plugin.engine.vllm.schedule.channel import in_flight
from spec_plugin.lifecycle.manager import built_in_method

SECONDS = 25.0  # of a self-test; bfloat16 is ten times slower than float32 on a CPU without its instructions
TOKENS = 96  # of a request that a weight sync finds in flight


def weights_are_gone(worker: Any) -> bool:
    """In the worker: is there nothing but garbage."""
    models = (worker.model_runner.get_model(), worker.get_draft_model())
    return all(bool(p.isnan().all()) for model in models for p in model.parameters() if p.is_floating_point())


def told(report: SelfTestReport) -> dict[str, Any]:
    """What is asserted of a self-test."""
    return {"passed": report.passed, "out_of_time": report.out_of_time, "text": report.failures()}


async def partial_rollouts(actor: Any) -> dict[str, Any]:
    """A weight sync as ``PPOTrainerAsync.broadcast_to_vllm`` does it with partial rollouts: requests in flight go on after it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    prompts = [[10 + i, 20, 30 + i] for i in range(4)]
    await actor.spec_set_schedule(Schedule((3,) * (await actor.spec_max_num_seqs() + 1)))
    await actor.spec_start_phase(6)
    alone = [list((await actor.generate(p, params)).outputs[0].token_ids) for p in prompts]
    await actor.spec_start_phase(7)
    flying = [asyncio.create_task(actor.generate(p, params)) for p in prompts]
    while sum((await in_flight(actor.llm)).values()) < len(prompts) * TOKENS // 4:
        await asyncio.sleep(0.01)
    await actor.spec_take_spans()
    await actor.pause_generation()
    late = asyncio.create_task(actor.generate(prompts[0], params))
    stats = await actor.spec_stats(7)
    found = {"self-test": told(await actor.spec_self_test(SECONDS)), "paused": await actor.llm.is_paused()}
    found["in flight at the sync"] = sorted((await in_flight(actor.llm)).values())
    await actor.spec_start_phase(8)
    await actor.resume_generation()
    outputs = [list((await request).outputs[0].token_ids) for request in (*flying, late)]
    found["same"] = outputs == [*alone, alone[0]]
    found["spans"] = sorted([s.version, s.first, s.until] for s in await actor.spec_take_spans())
    return found | {"tokens": stats.tokens, "drafts": stats.drafts, "after": (await actor.spec_stats(8)).tokens}


async def work(policy: str) -> dict[str, Any]:
    """The calls of the trainer and of its first actor rank, in their order."""
    setup_worker()  # before OpenRLHF is imported
    from spec_plugin_openrlhf.engine import SpecRolloutRayActor

    hf_config = json.loads((Path(policy) / "config.json").read_text())
    config = SpecConfig.parse({"self_test_seconds": SECONDS})
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_tokens": 1}
    target = TargetInfo(path=policy, hf_config=hf_config, dtype="bfloat16", sampling=sampling, device_type="cpu")
    given = {"spec_config": config, "spec_target": target}
    actor = type("Actor", (SpecRolloutRayActor,), given).__new__(SpecRolloutRayActor)
    actor.spec_config, actor.spec_target = config, target
    await actor.__init__(  # type: ignore[misc]  # Ray does it so
        model=policy,
        num_gpus=0,
        trust_remote_code=True,
        enforce_eager=True,
        max_num_seqs=16,
        max_model_len=128,
        dtype="bfloat16",
        enable_sleep_mode=True,
    )
    await actor.sleep()  # create_vllm_engines does
    method = built_in_method(config, target)
    draft = DraftTrainer(method.draft.config, TrainSettings(), device="cpu", seed=1)
    tensors = draft.engine_tensors(torch.bfloat16)
    found: dict[str, Any] = {"sent": digest(tensors)}
    report = await actor.spec_refresh(DraftRefresh(0, 0, tensors, digest(tensors)), False)
    found["installed"] = report.installed
    found["asleep after the refresh"] = (await actor.llm.collective_rpc(weights_are_gone))[0]
    found["held"] = (await actor.spec_state("refreshed")).draft_digest
    found["asleep after the audit"] = (await actor.llm.collective_rpc(weights_are_gone))[0]
    found["self-test asleep"] = told(await actor.spec_self_test(SECONDS))
    found["asleep after the self-test"] = (await actor.llm.collective_rpc(weights_are_gone))[0]
    await actor.wake_up()
    found["partial"] = await partial_rollouts(actor)
    found["held at the end"] = (await actor.spec_state("rollout")).draft_digest
    actor.llm.shutdown()  # an engine that outlives this process keeps our output open, and who reads it waits
    return found


if __name__ == "__main__":
    os.environ.setdefault("RAY_ADDRESS", "none")  # OpenRLHF asks Ray for it otherwise, and there is no Ray here
    print("FOUND " + json.dumps(asyncio.run(work(sys.argv[1]))), flush=True)
    os._exit(0)  # vLLM's own way out takes seconds
