"""The minimal adapter with random faults in every hook, every call to its engine, and every file that plugins write or read.

Session, control, engine and loop are real; what is planted here is what others would do to them. A planted wrong log-prob is
shown to the real session beside the batch that enters the loss, and must be refused.
"""

from __future__ import annotations

import asyncio
import builtins
import copy
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.lagging import LaggingAdapter
from minimal_adapter.loop import Settings, Trainer

from spec_plugin import LogprobProvenanceError, hookimpl
from spec_plugin.api import hookspecs
from spec_plugin.api.events import Drafts, LogprobBatch
from spec_plugin.lifecycle.recovery import Recovery
from spec_plugin.trainer import engine_control as control_module

#: chance of a fault in each call
CHANCE = 0.03
#: chance that nothing more is planted after a failure until drafts are back; else faults go on, in what runs without them
QUIET = 0.7
#: weight syncs until a fresh start, at most: a user's run waits for eight, and then for longer
WAITS = 3
#: steps in which drafts must be back, where nothing more is planted: those, a plain phase, the one that refreshes, one to spare
BACK_WITHIN = WAITS + 3
#: of the KV cache
KV_BLOCKS = 64
#: nats by which planted log-probs of drafted text are wrong
SHIFT = 3.0
#: nats that two correct float32 implementations of the tiny policy never differ by
HONEST = 0.01

GARBAGE = (None, math.nan, 7j, "text", [math.nan], {"spec/chaos": math.nan}, 10**400, object())
ERRORS = (RuntimeError, MemoryError, TimeoutError, OSError, KeyError, torch.OutOfMemoryError, RecursionError)
#: what plugins do with files
FILE_CALLS = (
    (os, "replace"),
    (builtins, "open"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "read_text"),
    (Path, "exists"),
)


class Dice:
    """Whether, and how, the next call fails."""

    def __init__(self, seed: str) -> None:
        self.rng, self.struck = random.Random(seed), Counter[str]()
        self.quiet = False

    def fault(self, call: str, kinds: tuple[str, ...]) -> str:
        """A kind, or nothing."""
        if self.rng.random() >= CHANCE or self.quiet:
            return ""
        kind = self.rng.choice(kinds)
        self.struck[f"{call}: {kind}"] += 1
        return kind

    def error(self) -> Exception:
        """Of any type."""
        return self.rng.choice(ERRORS)("planted by the soak")

    def garbage(self) -> Any:
        """An answer that is none."""
        return self.rng.choice(GARBAGE)


def faulty_plugin(dice: Dice) -> object:
    """A plugin that breaks, now and then, in each hook that law 6 guards."""

    def hook(name: str) -> Callable[..., Any]:
        def fire(self: object) -> Any:
            kind = dice.fault(name, ("raises", "garbage"))
            if kind == "raises":
                raise dice.error()
            return dice.garbage() if kind else None

        return hookimpl(tryfirst=True)(fire)

    strict = {
        "spec_method",
        "spec_configure",
        "spec_check_logprobs",
        "spec_check_stated",
    }  # there every failure stops the run
    names = [name for name in vars(hookspecs) if name.startswith("spec_") and name not in strict]
    return type("Chaos", (), {name: hook(name) for name in names})()


class FaultyLink:
    """A link whose calls fail, do not come back, come too late although they were carried out, or answer nonsense."""

    def __init__(self, link: Any, dice: Dice) -> None:
        self._link, self._dice = link, dice

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._link, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            kind = self._dice.fault(f"link.{name}", ("raises", "hangs", "too late", "garbage", "nobody hears"))
            if kind == "raises":
                raise self._dice.error()
            if kind == "hangs":
                await asyncio.Event().wait()
            if kind == "too late":
                return await asyncio.wait_for(real(*args, **kwargs), self._dice.rng.uniform(0, 0.02))
            answer = await real(*args, **kwargs)
            if kind == "nobody hears":
                raise ConnectionError("the answer was lost")
            return self._dice.garbage() if kind == "garbage" else answer

        return call


@contextmanager
def full_disk(dice: Dice, where: str) -> Iterator[None]:
    """Inside, calls on files fail now and then."""

    mine = threading.get_ident()  # the trainer's other threads have a disk of their own

    def broken(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine and dice.fault(f"{where}: {name}", ("no space",)):
                raise OSError(28, "No space left on device, planted by the soak")
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, name in FILE_CALLS:
            patches.enter_context(mock.patch.object(owner, name, broken(getattr(owner, name), name)))
        yield


def tear(dice: Dice, folder: Path) -> None:
    """Now and then one of a checkpoint's files is cut in half, as after a power failure."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if files and dice.fault("torn file", ("half",)):
        file = dice.rng.choice(files)
        os.truncate(file, file.stat().st_size // 2)


def planted(batch: LogprobBatch, rng: random.Random) -> LogprobBatch:
    """The same batch with something wrong in it that must never be trained on."""
    assert batch.rollout is not None
    row = rng.choice(batch.mask.any(-1).nonzero().flatten().tolist())
    places = batch.mask[row].nonzero().flatten().tolist()
    wrong, versions = batch.rollout.clone(), batch.versions.clone()
    kind = rng.choice(("NaN", "above zero", "recomputed", "version", "shifted" if batch.speculating else "version"))
    if kind == "version":
        versions[row, rng.choice(places)] = batch.policy_version + 1  # nobody can have sampled with later weights
        return replace(batch, versions=versions)
    if kind == "recomputed":
        recomputed = batch.recomputed.clone()
        recomputed[row, rng.choice(places)] = -math.inf
        return replace(batch, recomputed=recomputed)
    if kind == "shifted":
        return replace(batch, rollout=wrong - SHIFT * (batch.mask & (batch.drafted == Drafts.ON)))
    wrong[row, rng.choice(places)] = math.nan if kind == "NaN" else 0.5
    return replace(batch, rollout=wrong)


class Impatient(Recovery):
    """Tries again sooner than in a user's run, and without an end."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(most=1)
        self._rng = rng

    def failed(self, for_good: bool) -> None:
        """See ``Recovery``."""
        self._left = None if for_good else self._rng.randint(1, WAITS)


class Chaos(MinimalAdapter):
    """Mixed in before an adapter."""

    def __init__(self, settings: Settings) -> None:
        """The adapter's; afterwards nothing can be relied upon."""
        super().__init__(settings)
        control_module._START = 5.0  # a self-test that hangs is given up within the soak's own patience
        self.dice = Dice(os.environ["SOAK_SEED"])
        self.counts = Counter[str]()
        self.worst = 0.0  # nats between engine and actor, in batches that entered the loss
        self.spec.session._recovery = Impatient(self.dice.rng)
        self.away: int | None = None  # steps since a failure behind which nothing more is planted
        self.spec.session.manager.register(faulty_plugin(self.dice), name="chaos")
        self.spec.engines.link = FaultyLink(self.link, self.dice)  # type: ignore[assignment]
        self._check = self.spec.session.check_logprobs
        self.spec.session.check_logprobs = self.checked  # type: ignore[method-assign]

    def engine_arguments(self) -> dict[str, Any]:
        """With a KV cache that has been used from end to end soon: until then memory grows."""
        return {**super().engine_arguments(), "num_gpu_blocks_override": KV_BLOCKS}

    def checked(self, batch: LogprobBatch, chosen_from: int | None = None) -> None:
        """A wrong batch must not pass, and the right one must."""
        guard: Any = self.spec.session.manager.get_plugin("provenance")
        before = copy.deepcopy(vars(guard))
        wrong = planted(batch, self.dice.rng)
        try:
            for _ in range(3):  # text that is too short to be judged waits for more
                self._check(wrong)
            self.counts["wrong_accepted"] += 1
        except LogprobProvenanceError:
            self.counts["wrong_refused"] += 1
        vars(guard).update(before)  # what was planted is no part of the run's own history
        self._check(batch, chosen_from)
        assert batch.rollout is not None
        same = batch.mask & (
            batch.versions == batch.policy_version
        )  # the policy that sampled is the one that recomputes
        difference = (batch.rollout - batch.recomputed).abs()[same]
        self.worst = max(self.worst, float(difference.max()) if len(difference) else 0.0)
        self.counts["wrong_accepted"] += self.worst > HONEST
        self.counts["drafted_phases"] += batch.speculating

    def metrics(self) -> dict[str, float]:
        """The adapter's, what the process holds, and what was planted."""
        own = {
            "struck": self.dice.struck.total(),
            "worst": self.worst,
            "failed": self.spec.session.failed,
            **self.counts,
        }
        logged = {**super().metrics(), **{f"soak/{name}": float(value) for name, value in (own | holds()).items()}}
        assert all(math.isfinite(value) for value in logged.values())
        self._watch_recovery()
        (self.settings.out / "struck.txt").write_text("\n".join(sorted(self.dice.struck.elements())))
        return logged

    def _watch_recovery(self) -> None:
        """Drafts must come back after each failure, if nothing else fails meanwhile."""
        if self.away is None:
            if self.spec.session.failed and self.dice.rng.random() < QUIET:
                self.away, self.dice.quiet = 0, True
            return
        self.away += 1
        back = not self.spec.session.failed and self.spec.session.speculating
        if back or self.away > BACK_WITHIN:
            self.counts["came_back" if back else "stayed_away"] += 1
            self.away, self.dice.quiet = None, False

    def save(self, folder: Path) -> None:
        """The loop's own part is spared."""
        real = self.spec.session.save

        def save(path: Path) -> None:
            with full_disk(self.dice, "save"):
                real(path)
            tear(self.dice, path)

        with mock.patch.object(self.spec.session, "save", save):
            super().save(folder)

    def load(self, folder: Path) -> None:
        """The same."""
        real = self.spec.session.load

        def load(path: Path) -> None:
            with full_disk(self.dice, "load"):
                real(path)

        with mock.patch.object(self.spec.session, "load", load):
            super().load(folder)


class ChaosAdapter(Chaos):
    """Rollouts and training take turns."""


class LaggingChaosAdapter(Chaos, LaggingAdapter):
    """They overlap."""


class PlainLoop(Trainer):
    """The loop without the flag, with the same KV cache: what it holds is what vLLM holds, which grows by itself."""

    def engine_arguments(self) -> dict[str, Any]:
        """See ``Chaos``."""
        return {**super().engine_arguments(), "num_gpu_blocks_override": KV_BLOCKS}

    def metrics(self) -> dict[str, float]:
        """What the processes hold."""
        return {f"soak/{name}": value for name, value in holds().items()}


def holds() -> dict[str, float]:
    """Memory in MiB and open files, of this process and of its children."""
    mine = os.getpid()
    found = {"rss": resident(mine), "files": float(open_files(mine))}
    engines = children(mine)
    return found | {"engine_rss": sum(map(resident, engines)), "engine_files": float(sum(map(open_files, engines)))}


def children(pid: int) -> list[int]:
    """Of a process, theirs among them."""
    found = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    return found + [deeper for child in found for deeper in children(child)]


def resident(pid: int) -> float:
    """MiB."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:  # it has ended meanwhile
        return 0.0


def open_files(pid: int) -> int:
    """Descriptors."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
