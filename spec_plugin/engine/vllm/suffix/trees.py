"""One suffix tree for each prompt, kept over epochs: what a policy answered last time is most of what it answers now.

vLLM's own cache has a tree for each request, of its prompt alone, and one of all responses for all (SuffixDecoding, Oliaro et
al., arXiv 2411.04975). In RL the same prompts come back each epoch, to a policy that has hardly moved. The samples of one
group are no help to each other, since they are decoded side by side; those of the last epoch are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_plugin.api.rollouts import LatestRollouts, Rollout

Ids = NDArray[np.int32]

#: of the end of the prompt: context for the first tokens of the response
_TAIL = 12
#: share of the tokens that the tree of all prompts together may hold, for prompts that are seen for the first time
_SHARED = 1 / 16


@dataclass
class _Drafted:
    """A proposal, with the one attribute that vLLM's proposer reads."""

    token_ids: list[int]


@dataclass
class _Tree:
    """The tree of one prompt, as long as it has sequences."""

    tree: Any
    sequences: int = 0


@dataclass
class _Active:
    """A request in flight."""

    prompt: bytes
    number: int  # of its sequence, in the tree of its prompt and in the one of all
    response: list[int] = field(default_factory=list)
    shadow: list[int] | None = None  # what would have been drafted in this round, if k were not 0
    accepted: int = 0  # of it


class PromptTrees:
    """In the place of ``arctic_inference``'s ``SuffixDecodingCache``, with the part of its interface that vLLM calls.

    While k is 0 it goes on learning, and counts what drafting would have accepted (``take_shadow``): a draft from a look-up
    is accepted if and only if it is what was sampled, so the count is that of real rounds.
    """

    #: vLLM asks before a request starts whether its number is taken
    cached_requests: tuple[Hashable, ...] = ()

    def __init__(self, depth: int, width: int, most_tokens: int) -> None:
        """Start with no tree.

        Args:
            depth: longest end of the text that is looked up, and longest draft.
            width: most tokens that the engine drafts.
            most_tokens: of all rollouts that are kept; a tree takes about 310 bytes for each.
        """
        from arctic_inference.suffix_decoding import _C

        self._native: Any = _C
        self._depth, self._width = depth, width
        self._most = most_tokens
        self.forget()

    def forget(self) -> None:
        """Begin anew; vLLM starts a request that is sampled now once more."""
        self._latest = LatestRollouts(self._most)
        self._trees: dict[bytes, _Tree] = {}
        self._active: dict[Hashable, _Active] = {}
        self._shared, self._in_shared = self._new_tree(), deque[tuple[int, int]]()
        self._shared_tokens = self._numbers = self._phase = 0
        self._fresh: dict[int, Rollout] = {}  # of the present phase, by number; no more than are kept
        self._outgoing = deque[Rollout]()  # of the phase before, as long as nobody has asked for it
        self._rounds, self._would = 0, [0] * self._width

    def _new_tree(self) -> Any:
        return self._native.SuffixTree(self._depth)

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """Ids of the requests in flight."""
        return self._active.keys()

    def start_request(self, request: Hashable, prompt: Ids) -> None:
        """Add the prompt's end to the trees before the request samples its first token."""
        key = np.ascontiguousarray(prompt, dtype=np.int32).tobytes()
        self._active[request] = _Active(key, self._plant(key))

    def add_active_response(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Add the tokens that the request has sampled to the trees."""
        active = self._active[request]
        active.response += tokens
        self._trees[active.prompt].tree.extend(active.number, tokens)
        self._shared.extend(active.number, tokens)
        for token in tokens:
            self._compare(active, token)

    def stop_request(self, request: Hashable) -> None:
        """Keep the complete response for later requests of the same prompt."""
        active = self._active.pop(request)
        rollout = Rollout(active.prompt, np.asarray(active.response, dtype=np.int32).tobytes())
        self._fresh[active.number] = rollout
        self._keep(rollout, active.number, self._phase)

    def speculate(
        self,
        request: Hashable,
        context: Ids,
        max_spec_tokens: int,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> _Drafted:
        """What probably follows: by the tree of its own prompt, or by the one of all prompts where that is surer.

        Args:
            request: that has started.
            context: the end of its text.
            max_spec_tokens: most tokens; 0: none, but what would have been drafted is compared with what comes.
            max_spec_factor: most tokens for each that was matched.
            min_token_prob: share of the occurrences that went on like this.
        """
        active = self._active[request]
        if max_spec_tokens <= 0:
            if active.shadow is None:
                active.shadow = self._look_up(active, context, self._width, max_spec_factor, min_token_prob)
                self._rounds += 1
            return _Drafted([])
        active.shadow, active.accepted = None, 0
        return _Drafted(self._look_up(active, context, max_spec_tokens, max_spec_factor, min_token_prob))

    def take_shadow(self) -> tuple[int, list[int]]:
        """Rounds that drafting would have taken since the last call, and how many would have accepted each position."""
        found = self._rounds, self._would
        self._rounds, self._would = 0, [0] * self._width
        return found

    def take(self, most_tokens: int | None = None, more: bool = False) -> list[Rollout]:
        """What was sampled since the last call and is kept, and the beginning of another phase; nothing is sampled now.

        Args:
            most_tokens: of the answer, but for a first rollout that is longer; None: all.
            more: no other phase begins; what the call before has left over. It is gone when the next phase begins.
        """
        if not more:
            for request in list(self._active):  # vLLM stops a request when the next one runs
                self.stop_request(request)
            self._phase += 1
            self._outgoing, self._fresh = deque(self._fresh.values()), {}
        taken: list[Rollout] = []
        left = sum(r.tokens for r in self._outgoing) if most_tokens is None else most_tokens
        while self._outgoing and (not taken or self._outgoing[0].tokens <= left):
            taken.append(self._outgoing.popleft())
            left -= taken[-1].tokens
        return taken

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """What other engines sampled in the phase that was taken last, or a run before this one.

        A token in a tree takes about a microsecond, and of a large batch little is kept: that is decided for all of them first.
        """
        fresh = dict(enumerate(rollouts, self._numbers + 1))
        self._numbers += len(fresh)
        kept, recent = set(fresh), set(fresh)
        for number, rollout in fresh.items():
            kept -= self._make_room(rollout, number, self._phase - 1, fresh)
            recent -= self._make_room_in_shared(rollout, number, fresh)
        for number, rollout in fresh.items():
            prompt, response = (
                np.frombuffer(part, dtype=np.int32).copy() for part in (rollout.prompt, rollout.response)
            )
            if number in kept:
                tree = self._plant_own(rollout.prompt, number, prompt)
                tree.extend_ndarray(number, response)  # which takes no read-only array
            if number in recent:
                self._shared.extend_ndarray(number, prompt[-1:])
                self._shared.extend_ndarray(number, response)

    def _plant(self, prompt: bytes) -> int:
        """A new sequence in the tree of its prompt, and in the one of all; its number."""
        self._numbers += 1
        ids = np.frombuffer(prompt, dtype=np.int32).copy()
        self._plant_own(prompt, self._numbers, ids)
        self._shared.extend_ndarray(self._numbers, ids[-1:])
        return self._numbers

    def _plant_own(self, prompt: bytes, number: int, ids: Ids) -> Any:
        """A new sequence in the tree of its prompt; the tree."""
        mine = self._trees.setdefault(prompt, _Tree(self._new_tree()))
        mine.sequences += 1
        mine.tree.extend_ndarray(number, ids[-_TAIL:].copy())
        return mine.tree

    def _keep(self, rollout: Rollout, number: int, phase: int) -> None:
        self._make_room(rollout, number, phase)
        self._make_room_in_shared(rollout, number)

    def _make_room(self, rollout: Rollout, number: int, phase: int, unplanted: Container[int] = ()) -> set[int]:
        """Remove from the prompts' trees what this one displaces; numbers of what is displaced, planted or not."""
        displaced = self._latest.add(rollout.prompt, number, rollout.tokens, phase)
        for prompt, old in displaced:
            self._fresh.pop(old, None)
            if old not in unplanted:
                self._trees[prompt].tree.remove(old)
                self._trees[prompt].sequences -= 1
                if not self._trees[prompt].sequences:
                    del self._trees[prompt]
        return {old for _, old in displaced}

    def _make_room_in_shared(self, rollout: Rollout, number: int, unplanted: Container[int] = ()) -> set[int]:
        """The same of the tree of all prompts, which has those that came last."""
        tokens = len(rollout.response) // 4
        self._in_shared.append((number, tokens))
        self._shared_tokens += tokens
        displaced = set()
        while self._shared_tokens > _SHARED * self._most and self._in_shared:
            old, tokens = self._in_shared.popleft()
            self._shared_tokens -= tokens
            displaced.add(old)
            if old not in unplanted:
                self._shared.remove(old)
        return displaced

    def _look_up(self, active: _Active, context: Ids, most: int, factor: float, least: float) -> list[int]:
        ends = np.ascontiguousarray(context[-self._depth :], dtype=np.int32)
        trees = (self._trees[active.prompt].tree, self._shared)
        found = [tree.speculate_ndarray(ends, most, factor, 0.0, least, False) for tree in trees]
        return list(max(found, key=lambda draft: draft.score).token_ids)  # the first of equals: its own prompt's

    def _compare(self, active: _Active, token: int) -> None:
        if active.shadow is None:
            return
        if active.accepted < len(active.shadow) and active.shadow[active.accepted] == token:
            self._would[active.accepted] += 1
            active.accepted += 1
        else:  # the token that the target samples at the end of each round
            active.shadow, active.accepted = None, 0
