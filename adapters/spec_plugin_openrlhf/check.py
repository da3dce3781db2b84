"""``spec-plugin check openrlhf``: reads a run's flags and says what ``--spec.enable`` would make of it."""

from __future__ import annotations

import argparse
import ast
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
    parsed,
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
        shapes=_shapes(flags),
        sleeps=bool(flags.sleep),
        rollout_in_loss="" if flags.correction == "off" else options.CORRECTION,
    )
    return RunPlan("openrlhf", tuple(found), facts, _notes(flags))


def known_flags() -> tuple[str, ...]:
    """Every flag of the installed OpenRLHF, as regular expressions; none where it is not installed.

    Its parser is built where nobody else can reach it, under ``if __name__ == "__main__"``, so its source is read.
    """
    tree = parsed(source_of("openrlhf", "cli/train_ppo_ray.py"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (c.args[0] for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument" and c.args)
    return tuple(filter(None, map(_pattern, named)))


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    if isinstance(name, ast.JoinedStr):  # f"--{prefix}.adam.lr"
        return "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in name.values)
    return ""


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


def _shapes(flags: argparse.Namespace) -> tuple[str, ...]:
    used = {
        "tp2": flags.tensor_parallel > 1,
        "dp2": _ranks(flags) // max(flags.ring, 1) > 1 or flags.engines > 1,
        "sp2": flags.ring > 1,
        "packed": flags.packed or flags.dynamic_batch or flags.ring > 1,  # OpenRLHF packs for the latter two by itself
        "async": flags.asynchronous and not flags.partial,
        "partial": flags.partial,
    }
    return tuple(name for name, uses in used.items() if uses)


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
