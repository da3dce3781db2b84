"""A session on a tiny target, with one plugin more, and a whole step of it as an adapter drives it."""

from __future__ import annotations

from pathlib import Path

import torch

from builders.batches import batch_of
from spec_plugin import (
    SpecConfig,
    hookimpl,
)
from spec_plugin.api.events import (
    Drafts,
    EngineSchedule,
    HiddenStates,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
    StepPair,
    StepTiming,
    TargetInfo,
    WeightSync,
)
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

H, V, SEQS = 32, 64, 4
TARGET = TargetInfo(
    path="/nowhere",
    hf_config={
        "model_type": "qwen3",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
    },
    dtype="float32",
    max_num_seqs=SEQS,
)


def session_with(plugin: object | None = None, **options: object) -> SpecSession:
    manager = create_manager(load_entry_points=False)
    if plugin is not None:
        manager.register(plugin, name="mine")
    return SpecSession(SpecConfig.parse(options), TARGET, manager)


def raising(hook: str, error: Exception) -> object:
    """A plugin whose one hook raises."""

    def implementation(self):
        raise error

    return type("Faulty", (), {hook: hookimpl(implementation)})()


def step(session: SpecSession, version: int, folder: Path) -> dict[str, float]:
    """One trainer step as an adapter drives it; every session method is called."""
    generator = torch.Generator().manual_seed(version)
    n = 12
    sync = WeightSync(version, torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator))
    session.load(folder)
    refresh = session.weight_sync(sync)
    if refresh is not None:
        report = RefreshReport(True, refresh.draft_version, refresh.digest, 1.0)
        with session.guarded(Reason.REFRESH):
            session.manager.hook.spec_refreshed(refresh=refresh, report=report)
    if version == 0:
        kinds = ((0, True, 1.0), (0, False, 1.1), (3, False, 1.5))
        steps = tuple(StepTiming(SEQS, k, paused, seconds, 100) for k, paused, seconds in kinds)
        session.engine_ready(SelfTestReport((), 1.0, steps))
    session.engines = EngineSchedule(session.schedule(version))
    session.rollout_start(version)
    session.rollout_end(
        RolloutStats(
            policy_version=version,
            requests=2,
            tokens=n,
            seconds=0.5,
            drafts=100,
            draft_tokens=300,
            accepted_tokens=200,
            accepted_per_pos=(90, 70, 40),
            steps=(StepTiming(2, 3, False, 1.5, 3),),
            pairs=(StepPair(2, 3, 1.5, 1.1),),
        )
    )
    hidden = HiddenStates(
        input_ids=torch.randint(V, (n,), generator=generator),
        aux=torch.randn(n, 3 * H, generator=generator),
        last=torch.randn(n, H, generator=generator),
        loss_mask=torch.arange(n) % 6 > 1,
        lengths=(6, 6),
        policy_version=version,
        milliseconds=0.1,
    )
    session.target_forward(hidden)
    logprobs = torch.full((2, 4), -1.0)
    mask = torch.ones(2, 4, dtype=torch.bool)
    for speculating in (False, True):
        drafts = Drafts.ON if speculating else Drafts.OFF
        session.check_logprobs(batch_of(version, logprobs, logprobs.clone(), mask, drafts))
    session.head_start()
    session.train_draft(version, 0.2)
    session.save(folder)
    return session.metrics()
