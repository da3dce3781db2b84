"""The last hidden states of a few sampled tokens, chosen before anybody knew them: what evidence of exact sampling stands on.

Whether a token counts may depend on what came before it, and on nothing else: not on where its text ends, on its reward, or on
whether there is still room, or a right run looks wrong (``make guards`` shows by how much). So a coin is thrown for each
sampled token, whose chance is that of this step, by how many tokens the step before had.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from spec_plugin.api.errors import pass_on
from spec_plugin.api.events import ChosenStates, TargetInfo
from spec_plugin.api.ranks import rank
from spec_plugin.api.spans import fingerprints
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.decoder import text_sizes
from spec_plugin.trainer.harvest import DecoderHarvest, Documents, RolloutHarvest, Rows, rows_of
from spec_plugin.trainer.taps import LAST, Taps

logger = logging.getLogger(__name__)

#: Seconds of one core for the distributions of a step's chosen tokens, in the mean. An element of the head takes so many of them
#: to be read, once, and for each token to be multiplied; a logit takes the last.
_SECONDS, _READ, _PRODUCT, _LOGIT = 0.3, 6e-10, 3.6e-11, 4e-8
#: chosen tokens of a step and rank, at most; on a card, whose time is not worth counting, as many
MOST, ON_CARD = 1024, 256


def tokens_of_a_turn(target: TargetInfo) -> tuple[int, int]:
    """How many tokens a rank chooses, in the mean, and in each how many-th step: by sizes alone, never by what a clock says.

    Where reading the head alone takes a third of a step's seconds, ranks take turns: each has more tokens, less often.
    """
    if target.device_type == "cuda":
        return ON_CARD, 1
    vocabulary, hidden = text_sizes(target.hf_config) or (1 << 18, 1 << 13)
    read = vocabulary * hidden * _READ
    turns = 1 + int(3.0 * read / _SECONDS)
    return min(MOST, max(1, int((turns * _SECONDS - read) / (vocabulary * (hidden * _PRODUCT + _LOGIT))))), turns


@dataclass
class _Kept:
    """The chosen tokens of one document."""

    places: Tensor  # [n] int64, in the document
    tokens: Tensor  # [n] int64
    last: Tensor  # [n, H] the states that they were sampled from


class EvidenceTap:
    """Keeps the states of the chosen tokens of a log-prob pass until their log-probs are checked."""

    def __init__(self, harvest: RolloutHarvest, session: SpecSession) -> None:
        """Nothing is kept where the harvest sees parts of documents or layers only, or nobody asks for evidence."""
        self._session, self._why = session, ""
        self._harvest: DecoderHarvest | None = None
        if not isinstance(harvest, DecoderHarvest):
            self._why = "no rank's pass goes through the whole model (Megatron)"
        elif not harvest.whole:
            self._why = "ranks share documents (Ulysses, ring attention), none has the states of a whole one"
        elif session.manager.has_plugin("exactness") and not session.target.truncated:
            self._harvest = harvest
        self._taps: Taps | None = None
        self._passed = self._expected = 0
        self.begin(-1)

    def begin(self, version: int) -> None:
        """The engines have this policy version: what is sampled from here on is chosen with one chance."""
        self._expected = self._passed or self._expected
        tokens, turns = tokens_of_a_turn(self._session.target)
        turn = self._expected > 0 and (version + rank()) % turns == 0
        self._chance = min(1.0, tokens / self._expected) if turn else 0.0
        self._coins = np.random.default_rng((self._session.config.seed, version + 1, rank()))
        self._passed = self._chosen = 0
        self._noisy = False
        self._kept: dict[tuple[int, int], list[_Kept]] = defaultdict(list)  # by length and fingerprint

    def none_for(self, lags: bool, stated: bool) -> str:
        """Why no tokens of this run are evidence, for ``LogprobBatch``; empty where some may be.

        Args:
            lags: do rollouts overlap with training, or lag behind it.
            stated: has the trainer asked for the engine's log-probs.
        """
        if lags:
            return "rollouts overlap with training: which tokens have come back hangs on how soon their texts ended"
        return self._why if stated else "the trainer does not ask the engines for log-probs"

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Trouble of this rank ends the evidence, here at once and everywhere with the next weight sync; nothing else stops."""
        try:
            yield
        except Exception as error:
            pass_on(error)
            self._why, self._harvest = f"rank {rank()} could not keep states: {type(error).__name__}: {error}", None
            logger.warning("spec-plugin: no evidence of exact sampling (law 2): %s", self._why)

    @contextmanager
    def capture(self, documents: Callable[[], Documents], rows: Rows | None = None) -> Iterator[None]:
        """Around one forward pass of the log-prob pass; trouble ends the evidence, and stops nothing (law 6).

        Args:
            documents: of this pass.
            rows: takes the final norm's output apart, as for the harvest.
        """
        chosen: list[tuple[int, Tensor]] = []
        with ExitStack() as attached:
            harvest, session = self._harvest, self._session
            if harvest is not None and harvest.in_pass and not (session.failed or session.idle):
                with self._harmless():
                    ids, masks = documents()
                    chosen = self._choose(masks)
                    if chosen:
                        take = rows or partial(rows_of, lengths=[len(document) for document in ids])
                        attached.enter_context(
                            self._taps_of(harvest).attached(partial(_before, chosen=chosen, rows=take))
                        )
            yield
        if chosen and self._taps is not None and self._harvest is not None:
            with self._harmless():
                self._keep(ids, chosen, self._taps.states()[LAST])
            self._taps.forget()  # whatever has failed

    def _taps_of(self, harvest: DecoderHarvest) -> Taps:
        if self._taps is None:
            self._taps = harvest.taps(())
        self._noisy = self._noisy or any(map(_drops_out, harvest.decoder.layers.modules()))
        return self._taps

    def _choose(self, masks: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Documents of a pass, by index, and their chosen places, [n] int64; the first sampled token, never drafted, is none."""
        found = []
        for index, mask in enumerate(masks):
            sampled = mask.nonzero().flatten().cpu()
            self._passed += len(sampled)
            heads = torch.from_numpy(self._coins.random(len(sampled)) < self._chance)
            heads[:1] = False
            if bool(heads.any()):
                found.append((index, sampled[heads]))
                self._chosen += int(heads.sum())
        return found

    def _keep(self, ids: Sequence[Tensor], chosen: Sequence[tuple[int, Tensor]], last: Tensor) -> None:
        states = torch.split(last.cpu(), [len(places) for _, places in chosen])
        for (index, places), state in zip(chosen, states, strict=True):
            document = ids[index].cpu()
            mark = int(fingerprints(document.numpy())[-1])
            self._kept[len(document), mark].append(_Kept(places, document[places], state))

    def of(self, documents: Sequence[Tensor], starts: Sequence[int]) -> ChosenStates | None:
        """The chosen tokens of a batch, each once; None where the pass kept none at all.

        Args:
            documents: token ids of each whole sequence, [n_i].
            starts: where the first column of the batch lies in each document.
        """
        if not self._passed or self._harvest is None:
            return None
        lengths, found = {length for length, _ in self._kept}, []
        for row, (document, start) in enumerate(zip(documents, starts, strict=True)):
            if len(document) not in lengths:
                continue
            same = self._kept.get((len(document), int(fingerprints(document.cpu().numpy())[-1])))
            if same:
                kept = same.pop(0)
                found.append((torch.full_like(kept.places, row), kept.places - start, kept.tokens, kept.last))
        empty = torch.zeros(0, dtype=torch.int64)
        rows, columns, tokens, last = map(torch.cat, zip(*found, strict=True)) if found else (empty,) * 4
        return ChosenStates(rows, columns, tokens, last, self._passed, self._chosen, self._noisy)


def _before(state: Tensor, chosen: Sequence[tuple[int, Tensor]], rows: Rows) -> Tensor:
    """[n, H]: the states before the chosen places, which they were sampled from."""
    found = rows(state)
    return torch.cat([found[index][(places - 1).to(state.device)] for index, places in chosen])


def _drops_out(module: nn.Module) -> bool:
    p = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return module.training and isinstance(p, float) and p > 0.0
