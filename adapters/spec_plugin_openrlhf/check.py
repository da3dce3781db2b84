"""``spec-plugin check openrlhf``: reads a run's flags and says what ``--spec.enable`` would make of it."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from importlib import metadata

from spec_plugin.adapter import (
    ENABLE,
    PREFIX,
    FindModel,
    Model,
    Objection,
    RunFacts,
    RunPlan,
    SpecConfig,
    SpecConfigError,
    read_config,
    source_of,
    split_arguments,
    split_launch,
    unsupported,
    wrong_option,
)
from spec_plugin_openrlhf import options

#: modules that are this run, stock or with our launcher before it
MODULES = (None, "openrlhf.cli.train_ppo_ray", "spec_plugin_openrlhf")


def check(arguments: Sequence[str], find: FindModel) -> RunPlan:
    """Read an OpenRLHF run as if ``--spec.enable`` were set; starts, imports and downloads nothing of it.

    Args:
        arguments: of ``openrlhf.cli.train_ppo_ray``, ``--spec.*`` among them, or the whole command line.
        find: looks for the model's config.json.
    """
    module, given = split_launch(arguments)
    found: list[Objection] = []
    if module not in MODULES:
        found.append(unsupported("-m", module, f"the trainer {module}", "use openrlhf.cli.train_ppo_ray"))
    spec, theirs = SpecConfig.parse(None), given
    try:
        theirs, ours = split_arguments(given)
        ours.pop(ENABLE, None)
        spec = read_config(ours)
    except SpecConfigError as error:
        found.append(wrong_option(error))
    theirs = [a for a in theirs if not a.startswith("--spec.")]
    flags, unreadable = options.read_flags(theirs)
    found += [*_unknown(theirs), *unreadable, *options.objections(flags)]
    model = Model("", None, "none is given")
    if flags.model is not None:
        model = find(flags.model)
        found += options.of_states(flags.model, model.config or {}, spec)
    facts = RunFacts(
        spec=spec,
        target=options.target_info(flags, dict(model.config or {}), max_num_seqs=0),
        model=model,
        model_option=options.MODEL,
        shape=_shape(flags),
        sleeps=bool(flags.sleep),
        rollout_in_loss="" if flags.correction == "off" else options.CORRECTION,
    )
    return RunPlan("openrlhf", tuple(found), facts, _notes(flags))


def known_flags() -> tuple[str, ...]:
    """Every flag of the installed OpenRLHF, as regular expressions; none where it is not installed.

    Its parser is built where nobody else can reach it, under ``if __name__ == "__main__"``, so its source is read.
    """
    source = source_of("openrlhf", "cli/train_ppo_ray.py")
    named = re.findall(r"\.add_argument\(\s*f?[\"'](--[^\"']+)", source)
    return tuple(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(name)) for name in named)  # "--{prefix}.adam.lr"


def _unknown(theirs: Sequence[str]) -> Iterator[Objection]:
    known = known_flags()
    if not known:
        yield Objection("", "", "no OpenRLHF", "OpenRLHF is not installed here", "run it where it is", "openrlhf")
        return
    ours = [f"{PREFIX}{name}" for name in (ENABLE, *SpecConfig.model_fields)]
    plain = [re.sub(r"\\(.)", r"\1", k) for k in known]
    version = metadata.distribution("openrlhf").version
    for flag in (a.partition("=")[0] for a in theirs if a.startswith("--")):
        if any(re.fullmatch(k, flag) for k in known) or sum(name.startswith(flag) for name in plain) == 1:
            continue
        near = difflib.get_close_matches(flag, [*plain, *ours], n=1)
        yield Objection(
            "",
            "",
            f"arguments that openrlhf {version} does not take",
            f"openrlhf {version} refuses this itself: it has no flag {flag}",
            f"did you mean {near[0]}?" if near else "leave it out",
            "openrlhf",
        )


def _ranks(flags: argparse.Namespace) -> int:
    return int(flags.nodes * flags.gpus_per_node)


def _shape(flags: argparse.Namespace) -> str:
    ring = f", ring attention over {flags.ring}" if flags.ring > 1 else ""
    when = "asynchronous; " if flags.asynchronous else ""
    return (
        f"{when}{_ranks(flags)} DeepSpeed actor ranks, ZeRO-{flags.zero_stage}{ring}; {flags.engines} vllm engines of "
        f"{flags.tensor_parallel} ranks each"
    )


def _notes(flags: argparse.Namespace) -> tuple[str, ...]:
    notes = ["the engine is always asked for log-probs, so that there is evidence where the correction is off"]
    if flags.asynchronous:
        notes.append(
            f"asynchronous: rollouts lag by up to {flags.queue} policy versions (--train.async_queue_size), by more if "
            "samples are kept back; each log-prob is judged by the version that sampled it, tightly where that recomputes it"
        )
    if flags.partial:
        notes.append(
            "partial rollouts: the draft is refreshed while the engines are paused for a weight sync; requests in flight go on "
            "with it, and wait where the engine is tested once more, before a trained draft is first served"
        )
    return tuple(notes)
