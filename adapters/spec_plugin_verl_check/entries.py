"""verl's trainers, as people start them: the module, where its configuration lies, and what its main makes of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from spec_plugin.adapter import Objection, unsupported
from spec_plugin_verl_check.options import APART, BOTH_PLACES


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


_EXPERIMENTAL = "verl.experimental"
MAIN = Entry("verl.trainer.main_ppo", "trainer", "ppo_trainer")
FULLY_ASYNC = Entry(
    f"{_EXPERIMENTAL}.fully_async_policy.fully_async_main",
    "experimental/fully_async_policy",
    "fully_async_ppo_trainer",
    only="fully_async",
)
ONE_STEP_OFF = Entry(
    f"{_EXPERIMENTAL}.one_step_off_policy.main_ppo",
    "experimental/one_step_off_policy",
    "one_step_off_ppo_trainer",
    only="one_step_off",
)
ENTRIES = {entry.module: entry for entry in (MAIN, FULLY_ASYNC, ONE_STEP_OFF)}


def hybrid_replicas(config: Any) -> Iterator[Objection]:
    """Options of ``fully_async`` that put engines into the actors' processes as well."""
    options = config.get("async_training")
    for name in ("use_trainer_do_validate", "use_dynamic_resource_scheduling"):
        if isinstance(options, DictConfig) and options.get(name):
            yield unsupported(f"async_training.{name}", True, BOTH_PLACES, "set it to False")
