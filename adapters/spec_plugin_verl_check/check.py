"""``spec-plugin check verl``: reads a run's arguments and says what the flag would make of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_plugin.adapter import (
    FindModel,
    Objection,
    RunFacts,
    RunPlan,
    SpecConfig,
    SpecConfigError,
    split_launch,
    unsupported,
    version_of,
    wrong_option,
)
from spec_plugin_verl_check import options, recurrent
from spec_plugin_verl_check.compose import ENTRIES, MAIN, REFUSALS, Entry, compose_config

#: how hydra says that an option is not there
_NOT_THERE = re.compile(r"Could not override '([^']+)'")
#: parts of the configuration that are asked here, and what they may be; OmegaConf lets any value stand in their place
_SECTIONS = {
    "actor_rollout_ref.actor": DictConfig,
    "actor_rollout_ref.rollout.checkpoint_engine": DictConfig,
    "actor_rollout_ref.rollout.engine_kwargs.vllm": (DictConfig, NoneType),
    "actor_rollout_ref.model": DictConfig,
    "actor_rollout_ref.model.lora": (DictConfig, NoneType),
    "algorithm": DictConfig,
    "algorithm.rollout_correction": (DictConfig, NoneType),
    "trainer.v1": DictConfig,
}


def check(arguments: Sequence[str], find: FindModel) -> RunPlan:
    """Read a verl run as if ``external_lib=spec_plugin_verl`` were set; starts, imports and downloads nothing of it.

    Args:
        arguments: of ``verl.trainer.main_ppo``, or the whole command line, with whatever main of verl's.
        find: looks for the model's config.json.

    Raises:
        SpecConfigError: if the command line is that of a script.
    """
    module, given = split_launch(arguments)
    entry = ENTRIES.get(module or MAIN.module)
    if entry is None:
        instead = f"use {MAIN.module} with trainer.v1.trainer_mode={' or '.join(options.MODES)}"
        return _stopped(unsupported("-m", module, f"the trainer {module}", instead))
    try:
        config, refused = _composed(given, entry)
    except ModuleNotFoundError as error:
        return _stopped(Objection("", "", str(error), str(error), "run the check where verl is installed", "verl"))
    return _stopped(*refused) if refused else _plan(config, entry, find)


def _composed(given: Sequence[str], entry: Entry) -> tuple[Any, list[Objection]]:
    """verl's configuration, and all that it refuses; hydra itself stops at the first name that it does not know."""
    refused: list[Objection] = []
    while True:
        try:
            config = compose_config(given, entry)
            broken = [*_broken_sections(config)]
            if not broken:
                OmegaConf.resolve(config)  # as the run does: also what nobody here looks at
            return config, [*refused, *broken]
        except REFUSALS as error:
            found, name = _refusal(error, entry)
            refused.append(found)
            rest = [word for word in given if word.partition("=")[0] != name]
            if len(rest) == len(given):
                return None, refused
            given = rest


def _refusal(error: Exception, entry: Entry) -> tuple[Objection, str]:
    """What verl refuses, and the option that its configuration lacks; empty where it is something else."""
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    lacks = _NOT_THERE.match(lines[0] if lines else "")
    name = lacks[1] if lacks else ""
    if name and (meant := _meant(name, entry)):
        return _of_verl(lines[0], meant), name
    return _of_verl(". ".join(lines[:2])), name  # further lines are of hydra's inside


def _stopped(*objections: Objection) -> RunPlan:
    return RunPlan("verl", objections, unseen=("everything else: verl would not get a configuration",))


def _of_verl(why: str, instead: str = "") -> Objection:
    verl = f"verl {version_of('verl') or ''}"
    instead = instead or f"write it as {MAIN.module} of {verl} takes it, or remove it"
    reason = f"arguments that {verl} does not take"
    return Objection("", "", reason, f"{verl} refuses this itself: {why}", instead, "verl")


def _meant(name: str, entry: Entry) -> str:
    """What to write in the place of an option that hydra does not find; empty where nothing is like it."""
    ours = options.PREFIX.removeprefix("+")
    if name.startswith((ours, "spec.")):
        option = name.removeprefix(ours).removeprefix("spec.")
        return f"write +{ours}{option}=…, since verl's configuration lacks what is spec-plugin's"
    near = difflib.get_close_matches(name, _names_of(entry), n=1)
    return f"did you mean {near[0]}?" if near else ""


@cache
def _names_of(entry: Entry) -> tuple[str, ...]:
    return tuple(_names(OmegaConf.to_container(compose_config([], entry))))


def _names(section: Any, before: str = "") -> Iterator[str]:
    for key, value in section.items() if isinstance(section, dict) else ():
        yield f"{before}{key}"
        yield from _names(value, f"{before}{key}.")


def _broken_sections(config: Any) -> Iterator[Objection]:
    for name, kinds in _SECTIONS.items():
        if not isinstance(section := OmegaConf.select(config, name), kinds):
            yield _of_verl(f"{name}={section}: verl expects a section of options here")


def _plan(config: Any, entry: Entry, find: FindModel) -> RunPlan:
    actor, rollout, model = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "model"))
    found = [*options.objections(rollout, model, config, str(config.trainer.get("device", "cuda")))]
    if any(objection.reason == options.NO_SIZE for objection in found):
        return _stopped(*found)
    spec = SpecConfig.parse(None)
    try:
        spec = options.read_config(rollout)
    except SpecConfigError as error:
        found.append(wrong_option(error))
    looked_up = find(str(model.path))
    hf, packed = looked_up.config or {}, bool(model.use_remove_padding)
    found += recurrent.objections(hf, actor.strategy, packed, spec.recurrent_states == "try")
    correction = config.algorithm.get("rollout_correction") or {}
    corrects = [name for name in ("bypass_mode", "rollout_is", "rollout_rs") if correction.get(name)]
    facts = RunFacts(
        spec=spec,
        target=options.target_info(
            rollout, str(model.path), hf, model, engine_options=options.engine_arguments(rollout)
        ),
        model=looked_up,
        model_option="actor_rollout_ref.model.path",
        shape=_shape(config, entry),
        sleeps=bool(rollout.free_cache_engine),
        rollout_in_loss=f"algorithm.rollout_correction.{corrects[0]}" if corrects else "",
        bypass="bypass_mode" in corrects,
    )
    return RunPlan("verl", tuple(found), facts, (*_notes(config, entry), *recurrent.notes(hf, packed)))


def _ranks(section: Any) -> int:
    """Ranks on all nodes together; 0 where a size is no number."""
    per_node, nodes = section.n_gpus_per_node, section.nnodes
    return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else 0


def _shape(config: Any, entry: Entry) -> str:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode, size = entry.mode(config), rollout.tensor_model_parallel_size
    sizes = (options.value_of(actor, f"{path}ulysses_sequence_parallel_size") for path in ("", "fsdp_config."))
    slices = next((size for size in sizes if isinstance(size, int) and size > 1), 1)  # as verl: the older option first
    asynchronous = "" if mode == options.MODES[0] else f"{mode}; "
    ulysses = f", Ulysses over {slices}" if slices > 1 else ""
    actors = f"{asynchronous}{_ranks(config.trainer) or '?'} {actor.strategy} actor ranks{ulysses}"
    apart = config.trainer.v1.trainer_mode == options.APART
    engines = _ranks(rollout if apart else config.trainer) // size
    return f"{actors}; {engines or '?'} {rollout.get('name')} engines of {size} ranks each"


def _notes(config: Any, entry: Entry) -> Iterator[str]:
    rollout, model, mode = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, entry.mode(config)
    if not rollout.calculate_log_probs:
        yield "rollout.calculate_log_probs=False: the flag asks the engine for log-probs all the same, to verify them"
    everywhere = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES")
    if "spec_plugin_verl" not in f"{model.external_lib} {everywhere}":
        yield f"the flag is not among these arguments, so this command starts a plain run: judged as if {options.FLAG} were"
    if model.external_lib and "spec_plugin_verl" not in str(model.external_lib):
        yield f"model.external_lib={model.external_lib} is set: give both, [{model.external_lib},spec_plugin_verl]"
    if entry.only:
        yield f"{entry.module} takes the flag as {options.EVERYWHERE}"
    if mode != options.MODES[0]:
        yield f"{mode}: rollouts lag behind the policy; each token's log-prob is judged by how many versions it is old"
    yield "verl's own checks were not run: batch sizes, options that its dataclasses lack, and the like"
