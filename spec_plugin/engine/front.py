"""The engine's front end: what every adapter needs in the process that owns vLLM's AsyncLLM, in one object."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from safetensors.torch import save_file

from spec_plugin.api.errors import SpecConfigError, pass_on
from spec_plugin.api.events import (
    DraftRefresh,
    EngineSchedule,
    EngineState,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestPart,
    SelfTestReport,
)
from spec_plugin.api.spans import Span
from spec_plugin.engine.control_group import ControlGroup, ControlStretch
from spec_plugin.engine.flight import Request, RequestTracker
from spec_plugin.engine.lossless import check_engine_options, check_sampling, check_speculative_config
from spec_plugin.engine.recurrent_states import check_states, for_states, turned_off
from spec_plugin.engine.selftest.probe import TOP
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan, questions_and_noise
from spec_plugin.engine.selftest.test import run_self_test
from spec_plugin.engine.vllm.additional import with_own_settings
from spec_plugin.engine.vllm.requests import options_of
from spec_plugin.engine.vllm.schedule.channel import (
    in_flight,
    pause_idle_draft,
    put_in_force,
    rest_of_steps,
    take_pairs,
    take_steps,
)
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
from spec_plugin.engine.vllm.schedule.plain import PLAIN
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.plan.engine_class import keeps_states
from spec_plugin.plan.own_folders import own_folder, place_for, sweep_own

logger = logging.getLogger(__name__)

#: the self-test's hard limit, as a multiple of the time that it should take
PATIENCE = 4
#: the chance that the self-tests of all engines of a run refuse one that is right
_FALSE_ALARM = 1e-6


class EngineFront:
    """Builds the engine's arguments, keeps the phase's clock and counters, and carries refresh, schedule and self-test."""

    def __init__(self, session: SpecSession, tokenizer: Any) -> None:
        """Start with an empty phase; set ``engine`` once it exists.

        Args:
            session: the session of this process; it says how to draft.
            tokenizer: Hugging Face tokenizer of the target, or None (the self-test then asks random tokens only).
        """
        self.session, self.tokenizer = session, tokenizer
        self.engine: Any = None
        self.adapter: Any = None  # vLLM's LoRARequest of the run's requests, once the engine has it
        self.policy_version = -1  # of the weights that roll out, as the actor announced them
        config = session.config
        self._group = ControlGroup(config.control_share, config.k, config.seed)
        self.schedule = EngineSchedule()  # in force
        self.interrupted = False  # set by the adapter: were requests ever cut short, to go on under the next policy
        self._tracker = RequestTracker()
        self._order = asyncio.Lock()
        self._open = asyncio.Event()  # not while the trainer has the engine paused for new weights
        self._open.set()
        self._validated = False  # were there requests of another sampling since the phase began
        self._rollouts_began = False  # and rollouts
        self._warned: set[str] = set()  # what ``noting`` has warned of
        self.reset_phase()

    def engine_arguments(self, given: Mapping[str, Any], extension: str) -> dict[str, Any]:
        """What to add to the trainer's own engine arguments; what a killed run has left in memory is removed.

        Args:
            given: the trainer's engine arguments.
            extension: import path of the worker extension, a subclass of ``SpecWorkerExtension``.

        Raises:
            SpecConfigError: if anything is not on the lossless allow-list, or set by the trainer too, or the target does not say
                what the self-test must know.
        """
        sweep_own()
        target, most = self.session.target, int(given.get("max_logprobs") or TOP)
        method = self.session.method
        config = method.speculative_config()
        check_speculative_config(config)
        check_sampling(dict(target.sampling))
        check_engine_options(given)
        check_states(target.hf_config, method.variable_length, method.name)
        if self.session.config.self_test and target.vocab_size is None:
            raise SpecConfigError(
                f"{target.file} names no vocab_size, which the self-test needs: use the model's complete config.json"
            )
        for name in ("speculative_config", "scheduler_cls"):
            if given.get(name) is not None:
                raise SpecConfigError(
                    f"the engine option {name} is set, and spec-plugin sets it too: remove one of them"
                )
        ours = method.worker_settings()
        return {
            **(with_own_settings(given, **ours) if ours else {}),
            **(turned_off(given) if self.stateful else {}),
            "speculative_config": config,
            "scheduler_cls": SCHEDULER,
            "worker_extension_cls": extension,
            "disable_log_stats": False,  # vLLM counts acceptance only then
            # the self-test tells ties by them; it is a limit, and only what a request asks for is computed
            "max_logprobs": most if most < 0 else max(most, TOP),
        }

    @asynccontextmanager
    async def sample(self, prompt: Sequence[int], sampling: Any) -> AsyncIterator[Request]:
        """Put around one request of the trainer's, and nothing else: the phase's clock runs inside.

        It waits while the engine is paused for new weights. Options that are not on the lossless allow-list turn drafts off for
        this request; a few of the others sample a stretch without drafts, for the log-prob check to compare with. Which policy
        version sampled what is kept for the actor (``spec_plugin.api.spans``)::

            async with front.sample(prompt, options) as request:
                output = await generate(prompt, {**options, "extra_args": request.extra_args})
                request.completed(output.token_ids)

        Args:
            prompt: token ids.
            sampling: the request's options: a mapping by vLLM's names, or its ``SamplingParams``.
        """
        options = options_of(sampling)
        await self._open.wait()  # what comes while new weights do is the next phase's
        await self.on_request(options)
        while not self._open.is_set():  # they may have come meanwhile
            await self._open.wait()
        listed = _is_listed(options)
        given = options.get("extra_args") or {}
        with self.request() as request:
            undrafted: Mapping[str, Any] = (
                {} if listed else PLAIN
            )  # what is not listed is exact without drafts, but slower
            if listed and self._rollouts_began and not given:  # nobody recomputes validation
                request.control = self.draw_control_stretch()
                undrafted = {} if request.control is None else request.control.extra_args
            request.extra_args = {**given, **undrafted, **request.extra_args}
            yield request
        kept = False
        if request.response is not None:
            with self.noting("which policy version sampled a response"):
                self._tracker.completed(request, prompt, self.policy_version, self.schedule.drafting)
                kept = True
        if not kept:
            self._tracker.forget()

    @contextmanager
    def request(self) -> Iterator[Request]:
        """Count one request; the time with at least one in flight is the phase's generation time."""
        with self._tracker.request(self.policy_version) as request:
            yield request
        self._group.ended(request.tokens)

    def draw_control_stretch(self) -> ControlStretch | None:
        """The stretch that the next request samples without drafts; None if it is not in the control group."""
        control = self._group.draw() if self.schedule.drafting else None
        return replace(control, first=0) if control is not None and self.stateful else control

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Around bookkeeping whose failure must not stop requests or syncs: one warning, then on without it (law 6)."""
        try:
            yield
        except Exception as error:
            pass_on(error)
            if what not in self._warned:
                self._warned.add(what)
                logger.warning("spec-plugin: could not record %s (reported once): %s", what, error, exc_info=error)

    @property
    def open(self) -> bool:
        """True while requests are let in, False while the trainer pauses the engine."""
        return self._open.is_set()

    def pausing(self) -> None:
        """The trainer is about to pause the engine for new weights: no request is let in from here on."""
        self._open.clear()

    async def paused(self) -> None:
        """The engine is paused for new weights, with its requests in flight: note how far each has come."""
        sampled: Mapping[int, int] | None = None
        with self.noting("which policy version samples which token of a response that a weight sync cut"):
            sampled = await asyncio.wait_for(in_flight(self.engine), self.session.config.refresh_timeout_s)
        self._tracker.pause(sampled, self.policy_version, self.schedule.drafting)

    def resumed(self) -> None:
        """The engine samples again: let requests in."""
        self._tracker.resume()
        self._open.set()

    def take_spans(self) -> list[Span]:
        """Who sampled which tokens since the last call."""
        return self._tracker.take_spans()

    @property
    def stateful(self) -> bool:
        """True if the target keeps recurrent states: k may then change only between requests (``states``)."""
        return keeps_states(self.session.target.hf_config)

    async def on_request(self, sampling: Mapping[str, Any]) -> None:
        """Before each request: where validation came first, the rollouts after it begin a phase of their own.

        Validation is recognised by its sampling options. Its acceptance and timing do not count for the rollouts, and a draft
        that the cut-off dropped in it is served again. Validation that samples as the rollouts do counts as one of them.

        Args:
            sampling: the request's temperature, top_p and top_k.
        """
        if self._rollouts_began:
            return
        async with self._order:
            with self.noting("what is validation and what is a rollout"):
                if _sampling_key(sampling) != _sampling_key(self.session.target.sampling):
                    self._validated = True
                    return
                if self._validated and not self.busy and not self._rollouts_began:
                    await self._begin_anew()
            self._rollouts_began = True

    async def _begin_anew(self) -> None:
        try:
            if self.schedule.confirmed is not None:
                await self.set_schedule(self.schedule.confirmed)
            await take_steps(self.engine)
            await take_pairs(self.engine)
        except Exception as error:  # law 6: the rollouts are sampled either way
            pass_on(error)
            logger.warning(
                "spec-plugin: validation is counted with the rollouts after it, since no new phase could begin: %s",
                error,
            )
            return
        self.reset_phase()

    async def look_at_draft(self) -> None:
        """Have every worker remember the draft as it was loaded, by which it knows one that was lost (sleep level 2)."""
        if self.session.config.sleep_level > 1:
            await self.engine.collective_rpc("spec_look_at_draft")

    async def install_tensors(self, refresh: DraftRefresh, force: bool, hold: bool = False) -> RefreshReport:
        """Have every worker install one draft, handed over in a file (safetensors) that only this user can read.

        Args:
            refresh: the draft.
            force: although its version is not newer.
            hold: the previous draft, until ``spec_settle``.

        Raises:
            OSError: if neither shared memory nor the disk has room for it.
        """
        with own_folder(place_for(sum(t.nbytes for t in refresh.tensors.values()))) as folder:
            file = folder / "draft.safetensors"
            save_file({name: t.detach().cpu().contiguous() for name, t in refresh.tensors.items()}, file)
            sent = {"path": str(file), "version": refresh.draft_version, "digest": refresh.digest}
            how = {"draft_temperature": refresh.draft_temperature, "force": force, "hold": hold}
            asked = {**sent, "names": list(refresh.tensors), **how}
            reports = await self.engine.collective_rpc("spec_install_file", kwargs=asked)
        first = reports[0]
        return RefreshReport(
            installed=all(r["installed"] for r in reports),
            draft_version=first["draft_version"],
            digest=first["digest"],
            milliseconds=first["milliseconds"],
            reason="; ".join(dict.fromkeys(r["reason"] for r in reports if r["reason"])),
        )

    async def set_schedule(self, schedule: Schedule) -> EngineSchedule:
        """k per batch size for the coming phase; a draft that no batch size uses is paused (needs a fresh prefix cache).

        Where this raises, what is in force is unknown, and all that is sampled counts as drafted.
        """
        if self.stateful:
            k = self.session.config.k
            schedule = for_states(schedule, k, k * self.schedule.drafting, self.busy)
        share = schedule.control_share
        self._group.first = share is None  # else each batch that is judged wants some of its own
        self._group.share = self.session.config.control_share if share is None else share
        self.schedule = EngineSchedule()
        await self.engine.reset_prefix_cache()
        self.schedule = await put_in_force(self.engine, replace(schedule, control_share=self._group.share))
        return self.schedule

    async def go_plain(self) -> None:
        """Draft nothing until the next ``set_schedule``; begins a phase, without asking the actor."""
        await self.set_schedule(self.session.plain_schedule)
        self.reset_phase()

    @property
    def busy(self) -> bool:
        """True if at least one request is in flight."""
        return self._tracker.in_flight > 0

    async def self_test(
        self, seconds: float, engines: int = 1, part: SelfTestPart = SelfTestPart.ALL
    ) -> SelfTestReport:
        """The start-up self-test on this engine (law 2); four times as long where less would prove nothing.

        Args:
            seconds: that it takes.
            engines: that are tested in this run, which share its chance of a false alarm.
            part: of it; of the seconds, too.
        """
        config, target = self.session.config, self.session.target
        vocab_size = target.vocab_size
        assert vocab_size is not None, "engine_arguments has asked"
        # rows beyond the tokenizer's pad the matrix: no prompt holds them, but an engine may sample them
        asked = vocab_size if self.tokenizer is None else min(len(self.tokenizer), vocab_size)
        await pause_idle_draft(self.engine, False)
        plan = SelfTestPlan(
            prompts=questions_and_noise(self.tokenizer, asked, config.seed),
            sampling=dict(target.sampling),
            k=config.k,
            vocab_size=vocab_size,
            alpha=_FALSE_ALARM / engines,
            seconds=part.share * seconds,
            limit=PATIENCE * seconds,
            part=part,
            max_num_seqs=target.max_num_seqs,
            whole=self.session.method.all_or_nothing_k,
            adapter=await self._served_adapter(),
        )
        report = await run_self_test(self.engine, plan)
        if self.session.method.memory is not None:
            await self.engine.collective_rpc("spec_forget_rollouts")  # the test's own questions
        self.reset_phase()
        return report

    async def _served_adapter(self) -> Any:
        """The LoRA adapter that the run's requests use, so that the self-test tests what samples; None if not loaded."""
        if self.adapter is not None and self.adapter.lora_int_id in await self.engine.list_loras():
            return self.adapter
        return None

    def start_phase(self, policy_version: int) -> None:
        """Begin a rollout phase under this policy version: counters and clock start anew."""
        self.policy_version = policy_version
        self.reset_phase(policy_version)

    async def stats(self, policy_version: int) -> RolloutStats:
        """Counts, acceptance and step timings since ``start_phase``."""
        steps = await take_steps(self.engine)
        rest = await rest_of_steps(self.engine)
        now, then = read_spec_counters(), self._counters
        before = then["accepted_per_pos"] or [0] * len(now["accepted_per_pos"])
        stats = RolloutStats(
            policy_version=policy_version,
            requests=self._tracker.requests,
            tokens=self._tracker.tokens,
            seconds=self._tracker.seconds,
            drafts=now["drafts"] - then["drafts"],
            draft_tokens=now["draft_tokens"] - then["draft_tokens"],
            accepted_tokens=now["accepted_tokens"] - then["accepted_tokens"],
            accepted_per_pos=tuple(n - b for n, b in zip(now["accepted_per_pos"], before, strict=True)),
            steps=steps,
            past_end_per_pos=rest.past_end_per_pos,
            prompt_tokens=rest.prompt_tokens,
            recomputed_tokens=rest.recomputed_tokens,
            pairs=await take_pairs(self.engine),
            interrupted=self.interrupted,
            **(await self._shadow() if self.session.method.memory is not None else {}),
        )
        decoding = sum(s.total for s in steps if not s.prompts)
        return replace(stats, busy_seconds=min(stats.seconds, max(rest.busy_seconds, decoding)))

    async def _shadow(self) -> dict[str, Any]:
        rounds, per_pos = (await self.engine.collective_rpc("spec_take_shadow"))[0]
        return {"shadow_rounds": rounds, "shadow_per_pos": tuple(per_pos)}

    async def state(self, moment: str) -> EngineState:
        """Digests of the weights that the workers hold; reads all of them, for ``spec.audit`` only.

        Raises:
            RuntimeError: if the workers hold different draft versions.
        """
        found = await self.engine.collective_rpc("spec_audit")
        versions = {f["draft_version"] for f in found}
        if len(versions) > 1:
            raise RuntimeError(
                f"this engine's workers hold several versions of the draft: {sorted(versions)}; a refresh reached only some of "
                "them: restart the run"
            )
        draft, target = (_one_digest([f[name] for f in found]) for name in ("draft", "target"))
        shared = {f"{name}_digest": found[0][name] for name in ("embed", "head")}
        admitted = 0 if await self.engine.is_paused() else self._tracker.in_flight
        return EngineState(moment, self.policy_version, versions.pop(), draft, target, admitted, **shared)

    def reset_phase(self, policy_version: int | None = None) -> None:
        """Counters and clock start anew; requests in flight go on counting, of a paused engine under this policy version."""
        self._tracker.begin(policy_version)
        self._group.begin()
        self._validated = self._rollouts_began = False  # see ``on_request``
        self._counters = read_spec_counters()


def _one_digest(parts: Sequence[str]) -> str:
    """The workers' common digest, or a digest of all of them where each holds a shard."""
    return parts[0] if len(set(parts)) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def _is_listed(sampling: Mapping[str, Any]) -> bool:
    """Are these sampling options on the lossless allow-list."""
    try:
        check_sampling(dict(sampling))
    except SpecConfigError:
        return False
    return True


def _sampling_key(sampling: Mapping[str, Any]) -> tuple[float, float, int]:
    """(temperature, top_p, top_k) by which validation is recognised, with vLLM's defaults; top_k 0 and -1 mean no limit."""
    given = (sampling.get("temperature", 1.0), sampling.get("top_p", 1.0), sampling.get("top_k", 0))
    return float(given[0]), float(given[1]), max(0, int(given[2]))
