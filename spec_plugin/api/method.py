"""What a drafting method is: the one thing that adapters, session and controller ask, whatever its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a method is judged without torch, whose import takes seconds
    from torch import Tensor

    from draft_training.draft import DraftShape
    from spec_plugin.api.rollouts import Rollout


#: tokens a step below which a draft that was given, and tried, is trained like an untrained one
KNOWS_NOTHING = 1.2


@dataclass(frozen=True)
class StartingDraft:
    """The draft that a run trains, or keeps in step with the policy."""

    config: DraftShape
    tensors: Mapping[str, Tensor] | None = None  # None: untrained, initialised by seed
    most_unrolled: int | None = None  # steps of the training-time test that teach anything; None: up to k


class Memory(Protocol):
    """What a method that drafts from rollouts keeps in the actor process, beyond the engines' own memory; trouble: law 6."""

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """After each rollout phase: what all engines sampled since the last time."""

    def recall(self) -> Sequence[Rollout]:
        """Before the first rollout: what the engines, which are new, are to remember."""


@dataclass(frozen=True)
class Method:
    """How a run drafts; what the hook ``spec_method`` returns."""

    name: str
    #: vLLM's ``speculative_config`` without ``model``; it must pass the lossless allow-list
    settings: Mapping[str, Any]
    #: called in the process that builds the engine, before it does: the folder that vLLM loads as ``model``
    model: Callable[[], Path | str | None] = field(default=lambda: None)
    #: what to harvest of the target's own forward passes: the layers whose incoming residual streams the draft reads (their
    #: number for the one that enters the final norm), () for the last states alone; None: nothing
    harvest: tuple[int, ...] | None = None
    draft: StartingDraft | None = None  # None: nothing is trained and nothing refreshed
    hf_config: Mapping[str, Any] | None = None  # config.json of a draft that is served as it is, as vLLM takes it apart
    pretrained: bool = False  # may be served before anything was trained
    all_or_nothing_k: bool = False  # drafts ``spec.k`` tokens or none: nothing between can be asked of it
    variable_length: bool = False  # proposes another number of tokens for each request, often none
    #: module:function, called with ``proposer_options`` in each worker before it makes its model runner
    proposer: str | None = None
    proposer_options: Mapping[str, Any] = field(default_factory=dict)  # plain values
    memory: Memory | None = None  # of a proposer that drafts from rollouts
    why: str = ""  # it was chosen, where the user left that open; in one line

    @property
    def draft_config(self) -> Mapping[str, Any] | None:
        """config.json of what the engine loads as the draft; None: nothing, or it is not known."""
        return self.hf_config if self.draft is None else self.draft.config.to_hf()

    @property
    def draws(self) -> bool:
        """May the engine draw the draft's proposals; else they are its likeliest tokens throughout."""
        return self.settings.get("draft_sample_method") == "probabilistic"

    @property
    def newborn(self) -> bool:
        """True where the draft begins knowing nothing."""
        return self.draft is not None and self.draft.tensors is None

    def worker_settings(self) -> dict[str, Any]:
        """What the engine's processes must know of it."""
        prepared = {"proposer": self.proposer, "proposer_options": dict(self.proposer_options)}
        return ({"variable_length": True} if self.variable_length else {}) | (prepared if self.proposer else {})

    def speculative_config(self) -> dict[str, Any]:
        """vLLM's ``speculative_config``; may write the draft's folder."""
        model = self.model()
        return dict(self.settings) | ({} if model is None else {"model": str(model)})
