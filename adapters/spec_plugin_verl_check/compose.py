"""verl's trainers as people start them, and their configuration, composed by hydra as verl does it, without importing verl."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from spec_plugin.adapter import folder_of
from spec_plugin_verl_check.options import APART

#: what hydra raises of arguments and configurations; ValueError: of odd groups, and of numbers with thousands of digits;
#: RecursionError: of lists in lists
REFUSALS = (HydraException, OmegaConfBaseException, argparse.ArgumentError, ValueError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """A module that ``python -m`` starts."""

    module: str
    name: str  # its primary configuration, in the folder ``config`` beside it
    only: str = ""  # the one mode that its trainer has, with engines in processes of their own; empty: it has an option

    def mode(self, config: Any) -> str:
        """How trainer and engines take turns, in verl's words."""
        return self.only or str(config.trainer.v1.trainer_mode)

    def configs(self, verl: Path) -> Path:
        """The folder of its configurations, in that of the installed verl."""
        return verl.joinpath(*self.module.split(".")[1:-1], "config")


MAIN = Entry("verl.trainer.main_ppo", "ppo_trainer")
_APART = (
    Entry("verl.experimental.fully_async_policy.fully_async_main", "fully_async_ppo_trainer", "fully_async"),
    Entry("verl.experimental.one_step_off_policy.main_ppo", "one_step_off_ppo_trainer", "one_step_off"),
)
ENTRIES = {entry.module: entry for entry in (MAIN, *_APART)}


def compose_config(arguments: Sequence[str], entry: Entry = MAIN) -> Any:
    """verl's configuration as ``python -m`` with this entry would have it.

    Args:
        arguments: of its main, hydra's own flags included.
        entry: which of verl's trainers.

    Raises:
        ModuleNotFoundError: if verl is not installed.
        REFUSALS: hydra's own, in whose words verl refuses them too.
    """
    folder = folder_of("verl")
    if folder is None:
        raise ModuleNotFoundError("verl is not installed here")
    parser = get_args_parser()
    parser.exit_on_error = False
    given, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}")
    # one of verl's own configurations looks for the others beside the folder in which it is started
    search = [MAIN.configs(folder)] if entry is not MAIN else []
    search += [Path(given.config_dir).resolve()] if given.config_dir else []
    more = [f"hydra.searchpath=[{','.join(f'file://{path}' for path in search)}]"] if search else []
    config_dir = (entry.configs(folder).parent / (given.config_path or "config")).resolve()
    name = (given.config_name or entry.name).removesuffix(".yaml")
    with warnings.catch_warnings(), initialize_config_dir(str(config_dir), version_base=None):
        warnings.simplefilter("ignore")  # a search path that is not there; hydra's error says what that means
        config = compose(name, [*given.overrides, *more])
    if entry.only:  # what its main writes into it before verl reads it, and the mode that is not written there
        rollout = config.actor_rollout_ref.rollout
        rollout.nnodes, rollout.n_gpus_per_node = config.rollout.nnodes, config.rollout.n_gpus_per_node
        config.trainer.v1.trainer_mode = APART
    return config
