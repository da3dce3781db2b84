"""verl's trainers, as people start them: the module, where its configuration lies, and what its main makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from spec_plugin.adapter import Objection, unsupported
from spec_plugin_verl_check.options import APART


@dataclass(frozen=True)
class Entry:
    """A module that ``python -m`` starts."""

    module: str
    folder: str  # with its folder ``config``, relative to verl's own
    name: str  # its primary configuration
    only: str = ""  # the one mode that its trainer has, with engines in processes of their own; empty: it has an option

    def complete(self, config: Any) -> None:
        """What the module's main writes into its configuration before verl reads it, and the mode that is not written there."""
        if self.only:
            rollout = config.actor_rollout_ref.rollout
            rollout.nnodes, rollout.n_gpus_per_node = config.rollout.nnodes, config.rollout.n_gpus_per_node
            config.trainer.v1.trainer_mode = APART

    def mode(self, config: Any) -> str:
        """How trainer and engines take turns, in verl's words."""
        return self.only or str(config.trainer.v1.trainer_mode)


MAIN = Entry("verl.trainer.main_ppo", "trainer", "ppo_trainer")
ENTRIES = (
    MAIN,
    Entry(
        "verl.experimental.fully_async_policy.fully_async_main",
        "experimental/fully_async_policy",
        "fully_async_ppo_trainer",
        only="fully_async",
    ),
    Entry(
        "verl.experimental.one_step_off_policy.main_ppo",
        "experimental/one_step_off_policy",
        "one_step_off_ppo_trainer",
        only="one_step_off",
    ),
)


def entry_of(module: str | None) -> Entry | None:
    """The entry that a launch names; ``main_ppo`` where it names none, and None for a module that is not known."""
    return MAIN if module is None else next((entry for entry in ENTRIES if entry.module == module), None)


def with_engines_beside(config: Any) -> Iterator[Objection]:
    """Options of ``fully_async`` that put engines into the actors' processes as well."""
    options = config.get("async_training")
    for name in ("use_trainer_do_validate", "use_dynamic_resource_scheduling"):
        if isinstance(options, DictConfig) and options.get(name):
            what = "rollouts both beside the actors and apart from them"
            yield unsupported(f"async_training.{name}", True, what, "set it to False")
