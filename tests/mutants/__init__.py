"""Mistakes that the unit tests must notice, room by room: ``make mutants`` makes each of them and runs the tests that it names.

A guard that nobody has seen fail is a hope. Each entry is a mistake that a colleague could make; when a test is weakened, the
mistake that it was there for survives. Who adds a law, a check or a bound adds the mistake that it is for.
"""

from __future__ import annotations

from mutants.adapters import MUTATIONS as ADAPTERS
from mutants.commands import MUTATIONS as COMMANDS
from mutants.drafts import MUTATIONS as DRAFTS
from mutants.engine import MUTATIONS as ENGINE
from mutants.in_process import MUTATIONS as IN_PROCESS
from mutants.kit import MUTATIONS as KIT
from mutants.mutation import Mutation
from mutants.policy import MUTATIONS as POLICY
from mutants.refresh import MUTATIONS as REFRESH
from mutants.survivors import MUTATIONS as SURVIVORS
from mutants.trainer import MUTATIONS as TRAINER
from mutants.training import MUTATIONS as TRAINING

ROOMS: dict[str, tuple[Mutation, ...]] = {
    "trainer, lifecycle": TRAINER,
    "engine": ENGINE,
    "refresh": REFRESH,
    "policy, methods": POLICY,
    "draft training": TRAINING,
    "judging drafts": DRAFTS,
    "of an attack": SURVIVORS,
    "adapters": ADAPTERS,
    "one process for trainer and engine": IN_PROCESS,
    "kit and commands": KIT,
    "commands, projection": COMMANDS,
}
MUTATIONS: tuple[Mutation, ...] = tuple(m for room in ROOMS.values() for m in room)
