"""The hooks of the evidence of exact sampling, and what it says."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_training.card import host_memory
from draft_training.errors import DraftConfigError
from draft_training.outside import logit_cap
from spec_plugin.api.errors import LosslessError, SpecConfigError, pass_on
from spec_plugin.api.events import ChosenStates, Drafts, LogprobBatch, RolloutStats, TargetInfo, WeightSync
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.ranks import is_first, sum_of_ranks, together
from spec_plugin.plan.text_files import write_whole
from spec_plugin.policy.exactness.capital import PLAIN, SHAPE, WEIGHED, Capital, Floats, bets, growth
from spec_plugin.policy.exactness.statistics import log_law, statistics_of

logger = logging.getLogger(__name__)

#: chances of a correct run to be stopped, ever, and to be given a line
REFUSED, SAID = 1e-7, 1e-3
#: Mean of a statistic that rounding may bring about, by the coarser dtype of engine and actor: twice the largest that was
#: measured in bfloat16 (1e-3 to 4e-3). Of float32 it is 1e-5, unless its weight sync goes through bfloat16.
ALLOWED = {"float32": 4e-3, "float16": 4e-3, "bfloat16": 8e-3}
#: nats, in the median, by which ``last @ head`` may miss the trainer's log-probs, or the engine's: beyond it these are of another
#: distribution, such as raw ones, before the temperature
_SAME = 0.05
#: phases of which some tokens did not come back, more of them than others, behind which there is no evidence in this run
_TORN = 3
#: tokens whose statistics a card computes at once; a CPU's cache holds one distribution
_ON_CARD = 32


def no_evidence(target: TargetInfo) -> str:
    """Why a run has no evidence by its options alone; empty where it may have some."""
    if target.truncated:
        return "top_p or top_k are set: rounding moves the edge of what they leave"
    if not target.sampling.get("temperature", 1.0):
        return "temperature=0: nothing is drawn"
    mode = target.engine_options.get("logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs" and target.sampling.get("temperature", 1.0) != 1.0:
        return f"logprobs_mode={mode}: the engine states other log-probs than it samples by"
    if target.sampling.get("allowed_token_ids"):
        return "allowed_token_ids is set"
    try:
        logit_cap(target.hf_config, target.file)
    except (DraftConfigError, SpecConfigError) as error:
        return str(error)
    return ""


class ExactnessGuard:
    """Bets on the tokens that came with their states; ranks add up what cells have grown by at the next weight sync."""

    def __init__(self) -> None:
        self._capital = Capital.new()
        self._head: Tensor | None = None
        self._said = False
        self._warned: set[int] = set()  # designs whose line was said
        self._torn = self._whole = 0  # phases
        self._sampled = 0  # tokens of this phase, by the engines, on the rank that hears of them
        self._begin()

    def _begin(self) -> None:
        self._grown: Floats = np.zeros(SHAPE)
        self._tokens = self._found = self._chosen = self._passed = 0
        self._drafted = False

    @hookimpl
    def spec_configure(self, target: TargetInfo) -> None:
        """Keep the options; whether there can be evidence is said at the first weight sync, by one process."""
        self._target, self._why = target, no_evidence(target)
        self._cap = None if self._why else logit_cap(target.hf_config, target.file)
        self._temperature = float(target.sampling.get("temperature", 1.0))
        dtype = max(target.dtype, target.actor_dtype, key=list(ALLOWED).index)
        self._allowed = ALLOWED[dtype]
        self._kind = [dtype, f"{self._temperature:.6g}"]

    def _end(self, why: str) -> None:
        """There is no evidence in this run from here on: say so once, on each rank that has found a reason of its own."""
        self._why, self._head = self._why or why, None
        if not self._said:
            self._said = True
            logger.info("spec-plugin: no evidence of exact sampling from the run's own text (law 2): %s", self._why)

    @hookimpl(wrapper=True)
    def spec_weight_sync(self, event: WeightSync) -> Generator[None, Any, Any]:
        """Judge the phase that ends with it, when all ranks' other plugins have taken it (collective); follow the policy's head.

        Raises:
            LosslessError: if the engine has been shown not to sample from the policy.
        """
        with together("take the weight sync"):
            result = yield
        self._judge()
        self._follow(event)
        return result

    def _follow(self, event: WeightSync) -> None:
        if event.lm_head is not None and not self._why:
            head = event.lm_head.detach()[: self._target.vocab_size]
            self._head = head if head.device.type == "cpu" else self._on_host(head)
        elif is_first():
            self._end("the weight sync carried no LM head")

    def _on_host(self, head: Tensor) -> Tensor:
        """A copy in pinned memory: on the card there is room for it only while engines sleep."""
        old = self._head
        fits = old is not None and old.dtype == head.dtype and old.shape == head.shape
        return (old if old is not None and fits else host_memory(head)).copy_(head)

    def _judge(self) -> None:
        """What all ranks have found in the phase: nothing, unless each token that the engines sampled came back once."""
        counts = [self._passed, self._sampled, self._chosen, self._found, self._tokens, self._drafted, bool(self._why)]
        total = sum_of_ranks(np.concatenate([np.array(counts, np.float64), self._grown.ravel()]))
        self._begin()
        passed, sampled, chosen, found, tokens, drafted, ended = total[: len(counts)]
        self._sampled = 0
        if ended and not self._why:
            self._why = "trouble of another rank, which says what"
        if ended or not (passed or drafted):  # of a run without drafts, or a phase without a log-prob pass
            return
        if passed != sampled or chosen != found:
            self._torn += 1
            if self._torn >= max(_TORN, self._whole):
                self._end(
                    f"in {self._torn} of {self._torn + self._whole} phases the log-prob pass had other tokens than were sampled "
                    f"(lately {passed:.0f} for {sampled:.0f}; of {chosen:.0f} chosen ones {found:.0f} came back): a filter "
                    "chooses by what was sampled"
                )
            return
        self._whole += 1
        self._capital = self._capital.after(total[len(counts) :].reshape(SHAPE), int(tokens))
        self._speak()

    def _speak(self) -> None:
        """What the capitals have come to: a refusal, or one line of each kind.

        Raises:
            LosslessError: at ``REFUSED``, of what is weighed by the stated log-probs.
        """
        capital, level = self._capital, self._capital.log10(WEIGHED)
        text = f"{capital.tokens} tokens of the run's own rollouts, most of all {{}},"
        what = f"{text} are evidence at a level of 1e-{level:.1f} that the engine does not sample from the policy"
        what = what.format(capital.richest(WEIGHED))
        if level >= -math.log10(REFUSED):
            raise LosslessError(
                f"{what}. A correct run is stopped with a chance of {REFUSED:g}. `spec-plugin doctor` checks the engine; without "
                "the flag the run does not speculate"
            )
        if level >= -math.log10(SAID):
            self._warn_once(WEIGHED, f"{what}. The run stops at {REFUSED:g}")
        if capital.log10(PLAIN) >= -math.log10(REFUSED):
            self._warn_once(
                PLAIN,
                f"{text.format(capital.richest(PLAIN))} are off the policy by more than rounding explains (a mean of "
                f"{self._allowed:g}), while the engine states them as it samples: does it have the policy's weights, temperature "
                "and, of a mixture of experts, kernels? The run goes on",
            )

    def _warn_once(self, design: int, text: str) -> None:
        if design not in self._warned:
            self._warned.add(design)
            logger.warning("spec-plugin: %s", text)

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        """How many tokens must come back."""
        self._sampled = stats.tokens

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        """Bet on the tokens of the batch that were chosen; trouble with them ends the evidence, and stops nothing."""
        self._drafted = self._drafted or bool((batch.mask & (batch.drafted == Drafts.ON)).any())
        self._why = self._why or batch.no_states  # said at the next weight sync, by the first rank
        if batch.states is None or self._why or self._head is None or batch.rollout is None:
            return
        self._passed, self._chosen = batch.states.passed, batch.states.chosen
        self._found += len(batch.states.rows)
        try:
            self._bet(batch, batch.states, batch.rollout)
        except Exception as error:
            pass_on(error)
            self._end(f"{type(error).__name__}: {error}")

    def _bet(self, batch: LogprobBatch, states: ChosenStates, rollout: Tensor) -> None:
        """On those that were sampled where drafts are verified, by the version that recomputes them."""
        at = states.rows, states.columns
        counts = batch.mask[at] & (batch.drafted[at] == Drafts.ON) & (batch.versions[at] == batch.policy_version)
        kept = counts.nonzero().flatten().cpu()
        if not len(kept):
            return
        rows, columns = states.rows[kept], states.columns[kept]
        log_p, values = self._values(states.last[kept], states.tokens[kept])
        stated = rollout[rows, columns].cpu().double()
        if float((log_p - batch.recomputed[rows, columns].cpu()).abs().median()) > _SAME:
            return self._end("the policy's head does not give the log-probs that the trainer recomputes")
        if float((log_p - stated).abs().median()) > _SAME:
            return self._end("the engine states other log-probs than the policy's, which the guard of log-probs judges")
        weights = (log_p - stated).exp().numpy()
        each = bets(values.numpy(), weights, None if states.noisy else self._allowed)
        self._grown += growth(each, columns.numpy())
        self._tokens += len(kept)

    def _values(self, last: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y), [n] float64, and the statistics, [n, S] float64, in the host's memory."""
        assert self._head is not None
        device = torch.device("cuda" if self._target.device_type == "cuda" and torch.cuda.is_available() else "cpu")
        with torch.inference_mode():
            # the head is read, and its parts turned into float32, once for all tokens of the batch
            log_p = log_law(last.to(device), self._head.to(device), self._temperature, self._cap)
            sampled, few = tokens.to(device), _ON_CARD if device.type == "cuda" else 1
            values = [
                statistics_of(*some) for some in zip(torch.split(log_p, few), torch.split(sampled, few), strict=True)
            ]
            return log_p.gather(1, sampled[:, None])[:, 0].double().cpu(), torch.cat(values).cpu()

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """The level of the evidence, and on how many tokens it stands: none is no evidence."""
        return {"spec/exactness": self._capital.log10(WEIGHED), "spec/exactness_tokens": float(self._capital.tokens)}

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """Write the capital to exactness.json."""
        path.mkdir(parents=True, exist_ok=True)
        capital = self._capital
        state = {"of": self._kind, "logs": capital.logs.tolist(), "tokens": capital.tokens, "phases": capital.phases}
        write_whole(path / "exactness.json", json.dumps(state))

    @hookimpl
    def spec_load(self, path: Path) -> None:
        """Go on with it, if dtypes and temperature, and what is bet on, are still the same."""
        file = path / "exactness.json"
        if not file.exists():
            return
        found = json.loads(file.read_text())
        logs = np.array(found["logs"], np.float64)
        if found["of"] == self._kind and logs.shape == SHAPE and np.isfinite(logs).all():
            self._capital = Capital(logs, int(found["tokens"]), int(found["phases"]))
