"""An engine with a tiny Qwen3-Next, gated delta nets beside attention, and a worker whose states can be made wrong."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import small
import torch
from inspected import Inspected
from live import K, LiveEngine
from spec_plugin_conformance import tiny
from spec_plugin_conformance.targets import tiny_targets

from draft_training.eagle3 import save_draft
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER

FAMILY = "qwen3_next"
DTYPE = getattr(torch, tiny_targets()[FAMILY].dtype)
AT_ONCE = 16
#: of the target's weights: with less its states hardly matter, with more the draft is hardly ever right
SPREAD = 0.12


@cache
def parts() -> tuple[str, str]:
    """Folders of (target, draft): what the target says depends on its states, and the draft is right now and then."""
    root = Path(tempfile.mkdtemp(prefix="spec-hybrid-"))
    target = tiny.make_target(root / "target", num_key_value_heads=2, family=FAMILY, initializer_range=SPREAD)
    config = small.draft_config(target)
    save_draft(root / "draft", config, {n: t.to(DTYPE) for n, t in small.good_tensors(config).items()})
    return str(target), str(root / "draft")


class FaultyStates(Inspected):
    """Once told so, what vLLM tells its gated delta nets of a step is wrong in a share of the steps."""

    FAULT, SHARE = "", 0.0

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder as Builder

        build = Builder.build

        def faulty(*args: Any, **options: Any) -> Any:
            found = build(*args, **options)
            if cls.FAULT and random.random() < cls.SHARE:
                FAULTS[cls.FAULT](found)
            return found

        Builder.build = faulty
        return super().__new__(cls, *args, **kwargs)

    def spec_fault(self, name: str, share: float = 1.0) -> None:
        """Begin with one of ``FAULTS``, or end with an empty name."""
        type(self).FAULT, type(self).SHARE = name, share


def _one_less(found: Any) -> None:
    if found.num_accepted_tokens is not None:
        found.num_accepted_tokens = (found.num_accepted_tokens - 1).clamp(min=1)


def _one_more(found: Any) -> None:
    if found.num_accepted_tokens is not None:
        found.num_accepted_tokens = (found.num_accepted_tokens + 1).clamp(max=K + 1)


def _first(found: Any) -> None:
    if found.num_accepted_tokens is not None:
        found.num_accepted_tokens = torch.ones_like(found.num_accepted_tokens)


def _swapped(found: Any) -> None:
    if found.num_accepted_tokens is not None:
        found.num_accepted_tokens = found.num_accepted_tokens.flip(0)


def _stale(found: Any) -> None:
    if found.has_initial_state is not None:
        found.has_initial_state = torch.ones_like(found.has_initial_state)


#: of a step's metadata: the state that is taken up is that of another token, of another request, or of one before it
FAULTS = {"one less": _one_less, "one more": _one_more, "first": _first, "swapped": _swapped, "stale": _stale}


class Hybrid(LiveEngine):
    """Started as the plugin starts one for a target with states."""

    async def _start(self, skip_patches: tuple[str, ...], extension: str, options: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        target, draft = parts()
        settings = {
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": K,
            "num_speculative_tokens_per_batch_size": [(1, AT_ONCE, K)],
        }
        arguments = {
            "skip_tokenizer_init": True,
            "scheduler_cls": SCHEDULER,
            "dtype": tiny_targets()[FAMILY].dtype,
            "max_model_len": 256,
            "enforce_eager": True,
            "max_num_seqs": AT_ONCE,
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "logprobs_mode": "processed_logprobs",
        }
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=target,
                worker_extension_cls=extension,
                additional_config={"spec_plugin": {"skip_patches": list(skip_patches)}},
                speculative_config=settings,
                **{**arguments, **options},
            )
        )

    def fault(self, name: str, share: float = 1.0) -> None:
        """See ``FaultyStates``."""
        self.run(self.engine.collective_rpc("spec_fault", args=(name, share)))


def start(**options: Any) -> Hybrid:
    """An engine with these options."""
    return Hybrid((), "hybrid.FaultyStates", options)


def without_preemption(vllm_config: Any, **kwargs: Any) -> Any:
    """vLLM's ``scheduler_cls``: ours, but requests go on where their drafts end."""
    from spec_plugin.engine.vllm.schedule.scheduler import make_scheduler

    scheduler: Any = make_scheduler(vllm_config, **kwargs)
    assert scheduler.spec_preemption is not None
    scheduler.spec_preemption = None
    return scheduler
