"""``spec-plugin check``: would this run be accepted, and what would it do? Asks the trainer's adapter; starts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands.adapters import installed_adapters, module_for
from spec_plugin.commands.forecast import Judgement, judge
from spec_plugin.plan.model_runner import Cluster
from spec_plugin.plan.refusals import read_json
from spec_plugin.plan.run_plan import FindModel, Model, RunPlan

#: what an adapter offers: the run's arguments and a finder of models, to what the run would be
Check = Callable[[Sequence[str], FindModel], RunPlan]


def find_check(trainer: str) -> Check:
    """The function ``check`` of a trainer's adapter.

    It is in the module ``<adapter>_check.check``, for an adapter whose import is itself the flag, or in ``<adapter>.check``. It
    gets the trainer's arguments, or the whole command line, and a ``FindModel``, and answers with a ``RunPlan``: what it makes of
    the run and objects to. All that is the same for every trainer is judged here.

    Args:
        trainer: name of the adapter's entry point in the group ``spec_plugin_adapters``.

    Raises:
        SpecConfigError: if there is no such adapter, or it offers none.
    """
    adapters = installed_adapters()
    if trainer not in adapters:
        raise SpecConfigError(
            f"no adapter is installed for {trainer!r}; there are: {', '.join(sorted(adapters)) or 'none'}"
        )
    module = module_for(adapters[trainer], "check")
    try:
        found: Check = import_module(module).check
    except ModuleNotFoundError as error:
        if error.name == module:
            raise SpecConfigError(f"the adapter for {trainer} offers no check ({module})") from error
        raise SpecConfigError(
            f"check {trainer} reads the trainer's own configuration, and this environment lacks {error.name}, which comes with "
            f"{trainer}: run it in the environment where {trainer} is installed"
        ) from error
    except (ImportError, AttributeError) as error:
        raise SpecConfigError(f"the adapter for {trainer} offers no check here ({module}: {error})") from error
    return found


def find_model(name: str) -> Model:
    """Look for a model's config.json in a folder and in the hub's local cache; nothing is ever downloaded."""
    if not name:
        return Model("", None, "none is given")
    file = Path(name) / "config.json"
    try:
        here = file.exists()
    except OSError as error:  # a name that no folder can have, or one that may not be looked into
        return Model(name, None, str(error))
    if not here:
        if (cached := in_hub_cache(name)) is None:
            return Model(name, None, "it is neither a folder with a config.json here nor in the hub's local cache")
        file = Path(cached)
    try:
        return model_from(file)(name)
    except SpecConfigError as error:
        return Model(name, None, str(error), unreadable=True)


def model_from(file: Path) -> FindModel:
    """A finder that takes this config.json for whatever model is asked for.

    Raises:
        SpecConfigError: if it cannot be read.
    """
    config = read_json(file)
    return lambda name: Model(name, config, str(file))


def in_hub_cache(name: str) -> str | None:
    """The config.json of a model in the hub's local cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the hub could have, such as a path
        return None
    return found if isinstance(found, str) else None


def judge_run(
    trainer: str, arguments: Sequence[str], find: FindModel = find_model, cluster: Cluster | None = None
) -> Judgement:
    """Judge one run.

    Args:
        trainer: name of its adapter.
        arguments: those of the trainer.
        find: looks for the model's config.json.
        cluster: the machines that it is judged for; None: this one.

    Raises:
        SpecConfigError: if it cannot be judged at all.
    """
    plan = find_check(trainer)(arguments, find)
    if not isinstance(plan, RunPlan):
        raise SpecConfigError(f"the check of the adapter for {trainer} answered {type(plan).__name__}, no RunPlan")
    return judge(plan, cluster)


def to_json(judgement: Judgement) -> str:
    """The judgement as JSON: its fields, ``accepted``, and a sentence for each objection."""
    table = asdict(judgement) | {
        "accepted": judgement.accepted,
        "objections": [asdict(o) | {"sentence": str(o)} for o in judgement.objections],
    }
    return json.dumps(table, indent=1)


def to_text(judgement: Judgement) -> Iterator[str]:
    """The judgement for a person, line by line; the verdict comes last, where the eye is."""
    for subject, text in judgement.facts.items():
        yield f"  {subject:<20} {text}"
    for title, lines in (("notes", judgement.notes), ("not checked", judgement.unseen)):
        if lines:
            yield title
            yield from (f"  {line}" for line in lines)
    if judgement.accepted:
        except_for = " (except for what was not checked)" if judgement.unseen else ""
        yield f"accepted: this {judgement.trainer} run would start{except_for}"
        return
    yield f"refused: this {judgement.trainer} run would stop; reasons: {len(judgement.objections)}"
    yield from (f"  {number}. {objection}" for number, objection in enumerate(judgement.objections, 1))
