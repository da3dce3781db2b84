"""``spec-plugin check verl``: reads a run's arguments and says what the flag would make of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
)
from spec_plugin_verl_check import options, recurrent
from spec_plugin_verl_check.actors import ACTORS, options_of
from spec_plugin_verl_check.compose import ENTRIES, MAIN, REFUSALS, Entry, compose_config

#: parts of the configuration that are asked here, and those that may also be null or absent
_SECTIONS = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout.checkpoint_engine",
    "actor_rollout_ref.model",
    "algorithm",
    "trainer.v1",
)
_OPTIONAL = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "actor_rollout_ref.model.lora",
    "algorithm.rollout_correction",
)


def check(arguments: Sequence[str], find: FindModel) -> RunPlan:
    """Read a verl run as if ``external_lib=spec_plugin_verl`` were set; starts, imports and downloads nothing of it.

    Args:
        arguments: of ``verl.trainer.main_ppo``, or the whole command line, with whatever main of verl's.
        find: looks for the model's config.json.
    """
    module, given = split_launch(arguments)
    entry = ENTRIES.get(module or MAIN.module)
    if entry is None:
        instead = f"use {MAIN.module} with trainer.v1.trainer_mode={' or '.join(options.MODES)}"
        return _stopped(unsupported("-m", module, f"the trainer {module}", instead))
    try:
        config = compose_config(given, entry)
        broken = list(_broken_sections(config))
        if not broken:
            OmegaConf.resolve(config)  # as the run does: also what nobody here looks at
    except ModuleNotFoundError as error:
        return _stopped(Objection("", "", str(error), str(error), "run the check where verl is installed", "verl"))
    except REFUSALS as error:
        lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
        return _stopped(_of_verl(". ".join(lines[:2])))  # further ones are of hydra's inside
    return _stopped(*broken) if broken else _plan(config, entry, find)


def _stopped(*objections: Objection) -> RunPlan:
    return RunPlan("verl", objections, unseen=("everything else: verl would not get a configuration",))


def _of_verl(why: str) -> Objection:
    version = version_of("verl") or ""
    instead = f"write it as {MAIN.module} of verl {version} takes it, or remove it"
    return Objection(
        "",
        "",
        f"arguments that verl {version} does not take",
        f"verl {version} refuses this itself: {why}",
        instead,
        "verl",
    )


def _broken_sections(config: Any) -> Iterator[Objection]:
    for name in (*_SECTIONS, *_OPTIONAL):
        section = OmegaConf.select(config, name)
        if not (isinstance(section, DictConfig) or (section is None and name in _OPTIONAL)):
            yield _of_verl(f"{name}={section}: verl expects a section of options here")


def _plan(config: Any, entry: Entry, find: FindModel) -> RunPlan:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    device = str(config.trainer.get("device", "cuda"))
    found = [
        *options.misplaced(OmegaConf.to_container(config, resolve=False)),
        *options.objections(rollout, model, config, device),
    ]
    if any(o.reason == options.NO_SIZE for o in found):
        return _stopped(*found)
    spec = SpecConfig.parse(None)
    try:
        spec = options.read_config(rollout)
    except SpecConfigError as error:
        if not any(str(o) in str(error) for o in found):  # it was said already
            found.append(Objection("", "", "a spec option", str(error), "`spec-plugin options` lists them"))
    looked_up = find(str(model.path))
    hf, packed = looked_up.config or {}, bool(model.use_remove_padding)
    strategy, tried = config.actor_rollout_ref.actor.strategy, spec.recurrent_states == "try"
    found += recurrent.objections(hf, strategy, packed, tried)
    correction = config.algorithm.get("rollout_correction") or {}
    bypass = bool(correction.get("bypass_mode"))
    arguments = options.engine_arguments(rollout)
    facts = RunFacts(
        spec=spec,
        target=options.target_info(rollout, str(model.path), hf, model, engine_options=arguments),
        model=looked_up,
        model_option="actor_rollout_ref.model.path",
        shape=_shape(config, entry),
        shapes=_shapes(config, entry, hf.get("model_type")),
        eager=bool(arguments["enforce_eager"]),
        graphs=options.graph_mode(rollout),
        tensor_parallel_option="actor_rollout_ref.rollout.tensor_model_parallel_size",
        sleeps=bool(rollout.free_cache_engine),
        rollout_in_loss=bypass or any(correction.get(name) for name in ("rollout_is", "rollout_rs")),
        bypass=bypass,
    )
    return RunPlan("verl", tuple(found), facts, (*_notes(config, entry), *recurrent.notes(hf, packed)))


def _sequence_parallel(config: Any) -> int:
    """verl takes the actor's own option, which is the older one, where it is above 1."""
    actor = config.actor_rollout_ref.actor
    sizes = (section.get("ulysses_sequence_parallel_size") for section in (actor, actor.get("fsdp_config") or {}))
    return next((size for size in sizes if isinstance(size, int) and size > 1), 1)


def _sizes(config: Any) -> tuple[int, int, int]:
    """Ranks of the actor, of all engines, and of one engine; 0 where it is not a number."""

    def ranks(section: Any) -> int:
        per_node, nodes = section.n_gpus_per_node, section.nnodes
        return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else 0

    rollout = config.actor_rollout_ref.rollout
    apart = config.trainer.v1.trainer_mode == options.APART
    return ranks(config.trainer), ranks(rollout if apart else config.trainer), rollout.tensor_model_parallel_size


def _shape(config: Any, entry: Entry) -> str:
    ranks, all_engines, size = _sizes(config)
    mode, slices = entry.mode(config), _sequence_parallel(config)
    asynchronous = "" if mode == options.MODES[0] else f"{mode}; "
    ulysses = f", Ulysses over {slices}" if slices > 1 else ""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    actors = f"{asynchronous}{ranks or '?'} {actor.strategy} actor ranks{ulysses}"
    return f"{actors}; {all_engines // size or '?'} {rollout.get('name')} engines of {size} ranks each"


def _shapes(config: Any, entry: Entry, family: Any) -> tuple[str, ...]:
    ranks, _, size = _sizes(config)
    mode = entry.mode(config)
    model, slices = config.actor_rollout_ref.model, _sequence_parallel(config)
    used = {
        "tp2": size > 1,
        "dp2": ranks // slices > 1,
        "nodes2": isinstance(config.trainer.nnodes, int) and config.trainer.nnodes > 1,
        "sp2": slices > 1,
        "lora": options.lora(model) == "merged",
        "lora-adapters": options.lora(model) == "adapter",
        "packed": bool(model.use_remove_padding),
        "mistral": family == "mistral",
        "colocate": mode == "colocate_async",
        "separate": mode == options.APART,
        "fully": mode == "fully_async",
        "one-step": mode == "one_step_off",
    }
    actor = config.actor_rollout_ref.actor
    if (backend := ACTORS.get(actor.strategy)) is not None:
        used |= backend.shapes(options_of(actor))
    return tuple(name for name, uses in used.items() if uses)


def _notes(config: Any, entry: Entry) -> Iterator[str]:
    rollout, model, mode = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, entry.mode(config)
    if not rollout.calculate_log_probs:
        yield "rollout.calculate_log_probs=False: the flag asks the engine for log-probs all the same, to verify them"
    if model.external_lib and "spec_plugin_verl" not in str(model.external_lib):
        yield f"model.external_lib={model.external_lib} is set: give both, [{model.external_lib},spec_plugin_verl]"
    if entry.only:
        yield f"{entry.module} takes the flag as {options.EVERYWHERE}"
    if mode != options.MODES[0]:
        yield f"{mode}: rollouts lag behind the policy; each token's log-prob is judged by how many versions it is old"
    if rollout.free_cache_engine:
        yield "the engine sleeps between rollouts (free_cache_engine): the draft is refreshed after each wake"
    yield "verl's own checks were not run: batch sizes, options that its dataclasses lack, and the like"
