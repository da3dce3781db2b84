"""A draft that goes on while requests are in flight: nobody verifies what it drafted long ago for others (laws 2 and 7).

vLLM's V2 runner hands out the rows of the last step that drafted while its draft is paused. With ``probabilistic`` drafts a
step that verifies them compares stale tokens with stale probabilities, and takes them: of the policy's favourite tokens, 85 %
of all, it then sampled 25 %. So the draft runs again before a table asks for it (``channel.put_in_force``).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import small
from live import MAX_NUM_SEQS, K, live_engine
from spec_plugin_conformance.tiny import tiny_config

from draft_training.eagle3 import save_draft
from spec_plugin import SpecConfig
from spec_plugin.api.events import Schedule, TargetInfo
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.schedule.channel import put_in_force
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

pytestmark = [pytest.mark.engine, pytest.mark.v2]
#: the policy of ``small.make_target`` says the current token + STEP with this chance
STEP, FAVOURITE = 37, 0.849
BATCH, SIZE = 12, 16  # requests at once, and the engine's most
CYCLES = 10
SIGMAS = 5.0  # that a share may lie below FAVOURITE: one in 3 million, and a stale row costs 15 of them


def texts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, small.VOCAB) for _ in range(8)] for _ in range(BATCH)]


def is_favourite(before: int, token: int) -> bool:
    return (before + STEP) % small.VOCAB == token


def shares(found: Iterable[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """By name: how many were the policy's favourite, of how many."""
    by_name: dict[str, list[bool]] = {}
    for name, hit in found:
        by_name.setdefault(name, []).append(hit)
    return {name: (sum(hits), len(hits)) for name, hits in by_name.items()}


def assert_the_policys(counts: dict[str, tuple[int, int]]) -> None:
    print(f"\n{counts}")
    for name, (hits, n) in counts.items():
        least = FAVOURITE - SIGMAS * math.sqrt(FAVOURITE * (1 - FAVOURITE) / n)
        assert hits / n >= least, f"{name}: the policy's favourite token in {hits} of {n}, expected {FAVOURITE:.2f}"


class Stepped:
    """An engine in this process that makes one step behind each call of the control channel, as EngineCore may."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        self.engine_core = self  # what the channel asks
        self.steps: list[dict[str, tuple[int, ...]]] = []  # of each step: what each request has sampled so far

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        answer = getattr(self.core, method)(*args)
        self.step()
        return answer

    def step(self) -> None:
        if self.llm.has_unfinished_requests():
            self.llm.step()
            self.steps.append({r.request_id: tuple(r.output_token_ids) for r in self.core.scheduler.requests.values()})

    def ask(self, name: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            self.llm.add_request(f"{name}-{i}", {"prompt_token_ids": list(prompt)}, params)

    def finish(self) -> None:
        while self.llm.has_unfinished_requests():
            self.step()

    def run(self, call: Any) -> None:
        asyncio.run(call)


@pytest.fixture(scope="module")
def stepped(target, config, tmp_path_factory) -> Stepped:
    draft = tmp_path_factory.mktemp("good") / "draft"
    save_draft(draft, config, small.good_tensors(config))
    speculation = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [(1, SIZE, K)],
        "draft_sample_method": "probabilistic",
    }
    llm = small.start_engine(target, draft, speculative_config=speculation, scheduler_cls=SCHEDULER)
    return Stepped(llm)


def new_tokens(steps: Sequence[dict[str, tuple[int, ...]]]) -> Iterable[tuple[int, int, int]]:
    """Of all requests: the number of a step, the token before its first one, and that."""
    for number, (earlier, later) in enumerate(itertools.pairwise(steps)):
        for request, tokens in later.items():
            known = earlier.get(request, ())
            if known and len(tokens) > len(known):
                yield number, known[-1], tokens[len(known)]


def test_law_2_every_step_after_a_pause_samples_from_the_policy(stepped):
    found = []
    for cycle in range(CYCLES):
        stepped.run(put_in_force(stepped, Schedule((K,) * (SIZE + 1))))
        stepped.ask(f"a{cycle}", texts(cycle), 8)  # leaves rows behind
        stepped.finish()
        stepped.run(put_in_force(stepped, Schedule((0,) * (SIZE + 1))))
        stepped.ask(f"b{cycle}", texts(1000 + cycle), 16)
        for _ in range(3):
            stepped.step()
        stepped.steps[:-1] = []
        stepped.run(put_in_force(stepped, Schedule((K,) * (SIZE + 1))))
        stepped.finish()
        found += [(f"step {n}", is_favourite(a, b)) for n, a, b in new_tokens(stepped.steps[:6])]
    assert_the_policys(shares(found))


def test_law_2_a_front_that_lets_the_draft_go_on_samples_from_the_policy():
    """The same as a trainer reaches it: through the front, of an engine in a process of its own that steps as it likes."""
    live = live_engine(method="good eagle3", draft_sample_method="probabilistic")
    target = TargetInfo("", tiny_config().to_dict(), "float32", max_num_seqs=MAX_NUM_SEQS)
    session = SpecSession(SpecConfig(k=K), target, create_manager((), (), load_entry_points=False))
    front = EngineFront(session, None)
    front.engine = live.engine
    found = [hit for cycle in range(CYCLES) for hit in live.run(_cycle(front, cycle))]
    assert_the_policys(shares(found))


async def _cycle(front: EngineFront, cycle: int) -> list[tuple[str, bool]]:
    drafting, plain = (Schedule((k,) * (MAX_NUM_SEQS + 1)) for k in (K, 0))
    await front.set_schedule(drafting)
    await asyncio.gather(*[_sample(front, f"a{cycle}-{i}", p, 8, []) for i, p in enumerate(texts(cycle))])
    await front.set_schedule(plain)
    sampled: list[list[int]] = [[] for _ in range(BATCH)]
    asked = [
        asyncio.ensure_future(_sample(front, f"b{cycle}-{i}", p, 20, sampled[i]))
        for i, p in enumerate(texts(1000 + cycle))
    ]
    while min(map(len, sampled)) < 3:
        await asyncio.sleep(0.01)
    await front.set_schedule(drafting)
    switched = [len(tokens) for tokens in sampled]  # about where each was
    await asyncio.gather(*asked)
    return [
        (f"{behind} behind the switch", is_favourite(tokens[at + behind - 1], tokens[at + behind]))
        for tokens, at in zip(sampled, switched, strict=True)
        for behind in range(-2, 5)
        if 1 <= at + behind < len(tokens)
    ]


async def _sample(front: EngineFront, name: str, prompt: list[int], tokens: int, sampled: list[int]) -> None:
    """All tokens of one request into ``sampled``, as they come."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=kind)
    async for output in front.engine.generate({"prompt_token_ids": prompt}, params, request_id=name):
        sampled += output.outputs[0].token_ids
