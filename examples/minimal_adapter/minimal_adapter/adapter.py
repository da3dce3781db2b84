"""The adapter: everything that spec-plugin needs from a trainer, in eight places of the loop. Read from top to bottom.

Each override is the loop's own method plus one thing. What is not here is the same for every trainer: ``SpecRun`` on the actor's
side, ``EngineFront`` on the engine's, ``SpecWorkerExtension`` inside vLLM's workers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimal_adapter.loop import Completion, Rollouts, Settings, Trainer, padded
from spec_plugin import adapter as spec
from spec_plugin.adapter import EngineFront  # before any session is made: the kit then watches the engine


class MinimalAdapter(Trainer):
    """The loop with speculative rollouts; made instead of ``Trainer`` when, and only when, the flag is set."""

    extension = "minimal_adapter.spec_worker.SpecWorker"
    link_type = spec.LocalLink
    overlaps = False  # does the engine generate while the trainer trains

    # ---- 1. options and target, before anything expensive starts: a wrong option is refused here

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        session = spec.SpecSession(spec.SpecConfig.parse(settings.spec, "--spec."), self.target())
        self.fronts = [EngineFront(session, tokenizer=None) for _ in range(settings.engines)]
        self.link = self.link_type([spec.EngineCalls(front) for front in self.fronts], session.config.refresh_timeout_s)
        harvest = partial(spec.DecoderHarvest, decoder=lambda: spec.find_decoder(self.policy))
        self.spec = spec.SpecRun(session, self.link, harvest, overlaps=self.overlaps)

    def target(self) -> spec.TargetInfo:
        """What spec-plugin is told of the policy, and of the engine that serves it."""
        given, path = self.settings, str(self.settings.target)
        hf, seqs, length = spec.load_hf_config(path, "--target"), given.max_num_seqs, given.max_model_len
        return spec.TargetInfo(path, hf, given.dtype, max_num_seqs=seqs, max_model_len=length, sampling=self.sampling)

    # ---- 2. the engine is built with a draft

    def engine_arguments(self) -> dict[str, Any]:
        """The loop's own, checked against the lossless allow-list, and what speculation adds."""
        given = super().engine_arguments()
        return {**given, **self.fronts[0].engine_arguments(given, self.extension)}

    def start_engine(self) -> None:
        super().start_engine()
        self.link.loop = self.engine.loop
        for front, llm in zip(self.fronts, self.engine.llms, strict=True):
            front.engine = llm

    # ---- 3. each request, on the engine's side

    async def request(self, index: int, prompt: list[int], most: int | None = None, extra: Any = None) -> Completion:
        async with self.fronts[index % len(self.fronts)].sample(prompt, self.sampling) as request:
            answer = await super().request(index, prompt, most, request.extra_args)
            request.completed(answer.tokens, answer.version, answer.log_probs)
        return answer

    # ---- 4. after target weights have reached the engine: refresh the draft, then allow the next rollout

    def sync(self) -> None:
        super().sync()
        self.announce()

    def announce(self) -> None:
        """The engine has the weights of this version."""
        embed, head = self.policy.get_input_embeddings().weight, self.policy.get_output_embeddings().weight
        spec.run_blocking(self.spec.weights_synced(self.policy_version(), embed, head))

    # ---- 5. the log-prob pass: harvest hidden states on the way, check the log-probs before the loss gets them

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """The loop's own log-probs; what raises here stops the run."""
        with self.spec.logprob_pass(lambda: self.documents(rollouts)):
            recomputed = super().log_probs(rollouts)
        self.check(rollouts, recomputed)
        return recomputed

    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        """Both sides' log-probs are about to enter the loss."""
        self.spec.check(self.responses(rollouts), recomputed)

    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        """Each document's token ids, and which of them the policy sampled."""
        documents = [torch.tensor(p + r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
        return documents, spec.responses_at_the_end(documents, [len(r) for r in rollouts.responses])

    def responses(self, rollouts: Rollouts) -> spec.Responses:
        """What the engine answered: log-probs, and the policy version that it stamped on each sequence."""
        stated, mask = padded(rollouts.log_probs)
        documents, starts = self.documents(rollouts)[0], [len(prompt) for prompt in rollouts.prompts]
        versions = torch.tensor(rollouts.versions), torch.tensor(rollouts.last_versions)
        return spec.Responses(documents, starts, mask, stated, versions)

    # ---- 6. after the policy's update: a slice of draft training

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        loss = super().update(rollouts, old, advantages)
        self.spec.policy_updated(self.step)
        return loss

    # ---- 7. and 8. metrics and checkpoints

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **self.spec.metrics()}

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.spec.save(folder / "spec_plugin")

    def load(self, folder: Path) -> None:
        """Both again, before the first weight sync."""
        super().load(folder)
        self.spec.load(folder / "spec_plugin")
