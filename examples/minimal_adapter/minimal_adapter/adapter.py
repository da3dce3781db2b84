"""The adapter: everything that spec-plugin needs from a trainer, in eight places of the loop. Read from top to bottom.

Each override is the loop's own method plus one thing. What is not here is the same for every trainer, and in spec_plugin:
``SpecSession`` fires the hooks, ``RolloutControl`` orders what happens around a rollout phase, ``EngineFront`` is what the
owner of the engine needs, ``SpecWorkerExtension`` works inside vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor

from minimal_adapter.loop import Engine, Rollouts, Settings, Trainer, padded
from spec_plugin import SpecConfig, events
from spec_plugin.actor.control import RolloutControl, RolloutHarvest, run_blocking
from spec_plugin.actor.decoder import find_decoder
from spec_plugin.actor.harvest import responses_at_the_end
from spec_plugin.engine.front import EngineFront
from spec_plugin.refusals import read_json
from spec_plugin.rollouts import Rollout
from spec_plugin.session import SpecSession

T = TypeVar("T")


class MinimalAdapter(Trainer):
    """The loop with speculative rollouts; made instead of ``Trainer`` when, and only when, the flag is set."""

    extension = "minimal_adapter.spec_worker.SpecWorker"

    # ---- 1. options and target, before anything expensive starts: a wrong option is refused here

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        config = SpecConfig.parse(settings.spec, "--spec.")
        self.session = SpecSession(config, self.target())
        self.front = EngineFront(self.session, tokenizer=None)
        self.link = Link(self.front)
        self.control = RolloutControl(self.session, self.link)
        self.harvest = RolloutHarvest(self.control, lambda: find_decoder(self.policy))

    def target(self) -> events.TargetInfo:
        """What spec-plugin is told of the policy, and of the engine that serves it."""
        folder, seqs, length = self.settings.target, self.settings.max_num_seqs, self.settings.max_model_len
        hf = read_json(folder / "config.json")
        return events.TargetInfo(
            str(folder), hf, "float32", max_num_seqs=seqs, max_model_len=length, sampling=self.sampling
        )

    # ---- 2. the engine is built with a draft

    def engine_arguments(self) -> dict[str, Any]:
        """The loop's own, checked against the lossless allow-list, and what speculation adds."""
        given = super().engine_arguments()
        return {**given, **self.front.engine_arguments(given, self.extension)}

    def start_engine(self) -> None:
        """Start the engine and let front and link know it."""
        super().start_engine()
        self.front.engine, self.link.engine = self.engine.llm, self.engine

    # ---- 3. each request is timed and counted

    async def request(self, index: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """One request."""
        with self.front.request() as counted:
            answer = await super().request(index, prompt)
            counted.tokens = len(answer[0])
        return answer

    # ---- 4. after target weights have reached the engine: refresh the draft, then allow the next rollout

    def sync(self) -> None:
        """The weight sync, and what hangs on it."""
        super().sync()
        self.refresh_draft()
        run_blocking(self.control.begin())

    def refresh_draft(self) -> None:
        """Announce the new policy; the control has the draft installed."""
        embed = self.session.copy_of(self.policy.get_input_embeddings().weight)
        head = self.session.copy_of(self.policy.get_output_embeddings().weight)
        run_blocking(self.control.synced(events.WeightSync(self.policy_version(), embed, head)))

    # ---- 5. the log-prob pass: harvest hidden states on the way, check the log-probs before the loss gets them

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """The loop's own log-probs.

        Raises:
            LogprobProvenanceError: if any is not the target's. Let it stop the run.
        """
        run_blocking(self.control.finish())
        self.harvest.open()
        with self.harvest.capture(lambda: self.documents(rollouts)):
            recomputed = super().log_probs(rollouts)
        self.check(rollouts, recomputed)
        return recomputed

    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        """Each document's token ids, and which of them the policy sampled."""
        documents = [torch.tensor(p + r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
        return documents, responses_at_the_end(documents, [len(r) for r in rollouts.responses])

    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        """Both sides' log-probs are about to enter the loss."""
        self.session.check_logprobs(self.batch(rollouts, recomputed))

    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> events.LogprobBatch:
        """Both sides' log-probs, and the version that the engine stamped on each sequence."""
        rollout, mask = padded(rollouts.log_probs)
        return events.LogprobBatch(
            policy_version=self.control.policy_version,
            recomputed=recomputed,
            rollout=rollout,
            mask=mask,
            rollout_versions=torch.tensor(rollouts.versions),
            speculating=self.control.speculating,
            rollout_in_loss=False,
        )

    # ---- 6. after the policy's update: a slice of draft training

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        """The loop's own update, then the draft's."""
        loss = super().update(rollouts, old, advantages)
        self.control.train_draft(self.step)
        return loss

    # ---- 7. metrics

    def metrics(self) -> dict[str, float]:
        """The loop's own and ``spec/…``."""
        return {**super().metrics(), **self.session.metrics()}

    # ---- 8. checkpoints

    def save(self, folder: Path) -> None:
        """The loop's checkpoint, and the plugins' beside it."""
        super().save(folder)
        self.session.save(folder / "spec_plugin")

    def load(self, folder: Path) -> None:
        """Both again, before the first weight sync."""
        super().load(folder)
        self.session.load(folder / "spec_plugin")


class Link:
    """spec_plugin's ``EngineLink`` for one engine in this process: each call runs on the engine's event loop."""

    def __init__(self, front: EngineFront) -> None:
        self.front = front
        self.engine: Engine | None = None

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        assert self.engine is not None
        result: T = await asyncio.wrap_future(self.engine.submit(work))
        return result

    async def install(self, refresh: events.DraftRefresh, force: bool, hold: bool = False) -> events.RefreshReport:
        """Send the draft by the loop's own transport; what the worker does with it is ``SpecWorker``'s."""
        timeout = self.front.session.config.refresh_timeout_s
        arguments = {"version": refresh.draft_version, "digest": refresh.digest, "force": force, "hold": hold}
        sent = self.front.install("spec_install_tensors", weights=save(dict(refresh.tensors)), **arguments)
        return await asyncio.wait_for(self._there(sent), timeout)

    async def set_schedule(self, schedule: events.Schedule) -> None:
        """Tokens to draft for each batch size."""
        await self._there(self.front.set_schedule(schedule))

    async def self_test(self, seconds: float) -> events.SelfTestReport:
        """The start-up self-test."""
        return await self._there(self.front.self_test(seconds))

    async def start_phase(self, policy_version: int) -> None:
        """Counters start anew."""
        self.front.start_phase(policy_version)

    async def stats(self, policy_version: int) -> events.RolloutStats:
        """Counters since then."""
        return await self._there(self.front.stats(policy_version))

    async def share_rollouts(self) -> list[Rollout]:
        """For methods that draft from what was sampled before."""
        return await self._there(self.front.take_rollouts())

    async def remember(self, rollouts: Sequence[Rollout]) -> None:
        """What a run before this one sampled."""
        await self._there(self.front.remember(rollouts))

    async def state(self, moment: str) -> events.EngineState:
        """Digests of what the worker holds, for ``--spec.audit true``."""
        return await self._there(self.front.state(moment))
