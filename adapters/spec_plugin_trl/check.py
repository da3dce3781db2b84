"""``spec-plugin check trl``: reads what a script's arguments, its YAML file and its own text tell of a run; starts nothing.

A TRL run is a Python program, so not all of it can be read. What can be: ``trl grpo …`` and ``trl rloo …`` with their flags and
``--config FILE``; of a script its flags that bear the names of fields, and ``GRPOConfig(name=value)`` where the value is written
out. What was not found counts as TRL's default, and where a script may say otherwise it is listed under *not checked*.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_plugin.adapter import (
    FindModel,
    Model,
    Objection,
    RunFacts,
    RunPlan,
    SpecConfig,
    SpecConfigError,
    TargetInfo,
    parsed,
    split_arguments,
    text_of,
)
from spec_plugin_trl import flag, options

CONFIGS = ("GRPOConfig", "RLOOConfig")
MODEL = "model_name_or_path"
#: TRL's defaults of the fields that decide, of 1.8 to 1.16
DEFAULTS: Mapping[str, Any] = {
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 512,
    **options.SAMPLING,
}
#: of RLOO, which has no such field
OF_RLOO: Mapping[str, Any] = {"vllm_importance_sampling_correction": None}
#: fields that count something; None where TRL chooses
COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_iterations",
    "vllm_tensor_parallel_size",
    "vllm_max_model_length",
)


def check(arguments: Sequence[str], find: FindModel) -> RunPlan:
    """Read a TRL run as if the flag were set.

    Args:
        arguments: the command line, from ``trl``, ``python``, ``accelerate`` or the script on; words ``SPEC_PLUGIN_TRL=…`` and
            ``--spec.*`` in it are options of ours.
        find: looks for the model's config.json.
    """
    found: list[Objection] = []
    spec, words = SpecConfig.parse(None), list(arguments)
    try:
        spec, words = _options(words)
    except SpecConfigError as error:
        found.append(Objection("", "", "a spec option", str(error), "`spec-plugin options` lists them"))
    given, unseen = _given(words)
    fields = {**DEFAULTS, **given}
    if not options.trl_version():
        found.append(Objection("", "", "no TRL", "TRL is not installed here", "run it where it is", "trl"))
    found += _uncounted(fields)
    found += options.objections(fields.get)
    model = Model("", None, "none is given")
    if isinstance(fields.get(MODEL), str):
        model = find(fields[MODEL])
        found += options.of_target(fields[MODEL], model.config or {}, spec)
    if "generation_batch_size" in given:
        unseen.append("generation_batch_size: the ranks share it, and it was taken for that of one rank")
    if not model.name:
        unseen.append(f"the model: neither --{MODEL} nor GRPOTrainer(model=…) with a name or a folder was found")
    facts = RunFacts(
        spec=spec,
        target=_target(fields, model),
        model=model,
        model_option="model",
        shape="one engine in each rank's own process; the ranks are the launcher's to choose",
        shapes=tuple(_shapes(fields)),
        tensor_parallel_option="vllm_tensor_parallel_size",
        sleeps=bool(fields.get("vllm_enable_sleep_mode")),
        rollout_in_loss=options.rollout_in_loss(fields.get),
    )
    return RunPlan("trl", tuple(found), facts, tuple(_notes(fields)), tuple(unseen))


def _options(words: Sequence[str]) -> tuple[SpecConfig, list[str]]:
    """Our options, and the words without them."""
    rest = [word for word in words if not word.startswith(f"{flag.FLAG}=")]
    said = next((word.partition("=")[2] for word in words if word.startswith(f"{flag.FLAG}=")), None)
    theirs, ours = split_arguments(rest)
    ours.pop("enable", None)
    return flag.options(f"{'1' if said is None else said} {flag.joined([], ours)}"), theirs


# ---- what of the run can be read


def _given(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields of the configuration that are written down, and what could not be looked at."""
    flags, fields, unseen = _flags(words), dict[str, Any](), list[str]()
    recipe = {word.removeprefix("trl.scripts.") for word in words} & {"grpo", "rloo"}
    if "rloo" in recipe:
        fields = dict(OF_RLOO)
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    if script is not None:
        fields |= _of_script(script, unseen)
    elif not recipe:
        unseen.append(
            "no script and neither `trl grpo` nor `trl rloo` is among the arguments: only their flags were read"
        )
    if "config" in flags:
        fields |= _of_yaml(Path(str(flags.pop("config"))), unseen)
    fields |= flags
    guessed = [name for name in ("use_vllm", "vllm_mode") if name not in fields] if script else []
    return fields, [*unseen, *(f"{name}: TRL's default, {DEFAULTS[name]!r}, is taken" for name in guessed)]


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--name``, as TRL's parser takes them."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if not has_value:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            found[name.replace("-", "_")] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(
            {"true": "True", "false": "False", "null": "None", "none": "None"}.get(text.lower(), text)
        )
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # no literal, whatever it is
        return text


def _of_yaml(file: Path, unseen: list[str]) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(text_of(file))
    except (SpecConfigError, ValueError, RecursionError, yaml.YAMLError) as error:  # such as of a date that is none
        unseen.append(f"--config {file}: it cannot be read: {' '.join(str(error).split())}")
        return {}
    if not isinstance(content, dict):
        unseen.append(f"--config {file}: it holds {type(content).__name__}, and no fields with values")
        return {}
    return {str(name): value for name, value in content.items()}


def _of_script(script: Path, unseen: list[str]) -> dict[str, Any]:
    """What ``GRPOConfig(…)``, ``RLOOConfig(…)`` and their trainers are given in a script, where it is written out."""
    try:
        tree = parsed(text_of(script))
    except (
        SpecConfigError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # the last two: nested too deeply
        unseen.append(f"{script}: it cannot be read: {error}")
        return {}
    found: dict[str, Any] = {}
    hidden: list[str] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in CONFIGS:
            for keyword in call.keywords:
                try:
                    found[str(keyword.arg)] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError):
                    hidden.append(keyword.arg or "**…")
        elif name in ("GRPOTrainer", "RLOOTrainer"):
            for keyword in call.keywords:
                if keyword.arg == "model" and isinstance(keyword.value, ast.Constant):
                    found[MODEL] = keyword.value.value
                if keyword.arg == "rollout_func":
                    unseen.append("rollout_func: it is refused, if it is not None")
    if hidden:
        unseen.append(f"{script}: fields that are computed: {', '.join(dict.fromkeys(hidden))}")
    elif not found:
        unseen.append(f"{script}: no GRPOConfig(name=value) was found in it")
    names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(tree)}
    return {**(OF_RLOO if "RLOOConfig" in names else {}), **found}


# ---- what is made of it


def _target(fields: Mapping[str, Any], model: Model) -> TargetInfo:
    hf = dict(model.config or {})
    own = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    steps = _steps(fields)
    bf16 = fields.get("bf16", not fields.get("fp16"))
    return TargetInfo(
        path=model.name,
        hf_config=hf,
        dtype="float16" if own == "float32" else str(own),  # vLLM's "auto"
        device_type="cuda",
        max_num_seqs=int(fields["per_device_train_batch_size"]) * int(steps),
        max_model_len=fields.get("vllm_max_model_length"),
        sampling=options.sampling_of(fields.get),
        actor_dtype="bfloat16" if bf16 else "float16" if fields.get("fp16") else "float32",
    )


def _uncounted(fields: dict[str, Any]) -> list[Objection]:
    """Counts that are none, for which the rest of the judgement takes TRL's defaults."""
    wrong = {name: fields[name] for name in COUNTS if fields.get(name) is not None}
    wrong = {name: value for name, value in wrong.items() if type(value) is not int or value < 1}
    for name in wrong:
        fields[name] = DEFAULTS.get(name)
    why = "it must be a whole number above 0"
    return [Objection(name, repr(value), "no number", why, "correct it", "trl") for name, value in wrong.items()]


def _steps(fields: Mapping[str, Any]) -> int:
    """Micro-batches for which one generation lasts, on one rank."""
    if batch := fields.get("generation_batch_size"):
        return max(1, int(batch) // int(fields["per_device_train_batch_size"]))
    return int(fields.get("steps_per_generation") or fields["gradient_accumulation_steps"])


def _shapes(fields: Mapping[str, Any]) -> Iterator[str]:
    """Deployment shapes that the run uses, as the conformance kit names them."""
    steps = _steps(fields)
    aligned = fields["gradient_accumulation_steps"] % (steps * (fields.get("num_iterations") or 1)) == 0
    used = {
        "skip": aligned and fields["vllm_importance_sampling_correction"] is False,
        "accumulate": fields["gradient_accumulation_steps"] > 1,
        "iterations": not aligned,
        "sleep": bool(fields.get("vllm_enable_sleep_mode")),
        "peft": bool(fields.get("use_peft")),
    }
    yield from (name for name, uses in used.items() if uses)


def _notes(fields: Mapping[str, Any]) -> Iterator[str]:
    yield "the engine is always asked for log-probs, so that there is evidence where TRL wants none"
    if fields.get("vllm_enable_sleep_mode"):
        yield "the engine sleeps at level 1 where TRL asks for level 2, which would drop the draft: its weights lie on the host"
