"""``spec-plugin check trl``: what flags and a YAML file tell of a run, and, if it is asked for, a dry run of a script.

Flags and ``--config FILE`` say all of ``trl grpo …`` and ``trl rloo …``. A script is a program: what neither its flags say nor is
certain without running it (``fields.of_script``) is *not seen*. With ``--spec.dry_run`` it runs in a process of its own, up to
the line that makes the trainer, and the configuration that this gets is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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
    refuse_script,
    split_arguments,
    text_of,
    wrong_option,
)
from spec_plugin_trl import fields as trl_fields
from spec_plugin_trl import flag, options

DRY_RUN = "--spec.dry_run"
MODEL = "model_name_or_path"
#: of a script, which decides the rest when it runs: nothing is held against what was not seen
OF_A_SCRIPT: Mapping[str, Any] = {"use_vllm": True}
#: TRL's defaults of the fields that decide, of 1.8 to 1.16; RLOO has no correction
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"use_vllm": False, "vllm_importance_sampling_correction": True},
    "rloo": {"use_vllm": False},
}


def check(arguments: Sequence[str], find: FindModel) -> RunPlan:
    """Read a TRL run as if the flag were set.

    Args:
        arguments: the command line, from ``trl``, ``python``, ``accelerate`` or the script on; words ``SPEC_PLUGIN_TRL=…`` and
            ``--spec.*`` in it are options of ours, and ``--spec.dry_run`` asks for a dry run of its script.
        find: looks for the model's config.json.

    Raises:
        SpecConfigError: if the command line is that of a shell script.
    """
    spec, words = SpecConfig.parse(None), [word for word in arguments if word != DRY_RUN]
    found: list[Objection] = []
    unseen: list[str] = []
    try:
        spec, words = _options(words)
    except SpecConfigError as error:
        found.append(wrong_option(error))
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if script is None and not {"-m", *DEFAULTS} & {*words}:
        refuse_script(words)
    if not options.trl_version():
        found.append(Objection("", "", "no TRL", "TRL is not installed here", "run it where it is", "trl"))
    fields, refused = _given(words, unseen)
    found += refused
    if script is not None and DRY_RUN in arguments:
        seen, of_trainer = _dry_run(words[script:], spec, unseen)
        fields, found = {**fields, **seen}, [*found, *of_trainer]
    elif script is not None:
        fields, refused = _of_script(Path(words[script]), fields)
        found += refused
        unseen.append(
            f"what {words[script]} makes of its flags: {DRY_RUN} runs it up to the line that makes the trainer"
        )
    found += options.objections(fields.get)
    named = str(fields.get(MODEL) or "")
    model = find(named)  # a --model-config stands in for one that was not seen, too
    found += options.of_target(named, model.config or {}, spec)
    facts = RunFacts(
        spec=spec,
        target=_target(fields, model),
        model=model,
        model_option="model",
        shape="one engine in each rank's own process; the ranks are the launcher's to choose",
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


def _of_script(script: Path, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[Objection]]:
    """The fields with what of the script is certain; and what it gives to TRL's configurations that these do not have."""
    try:
        model, refused = trl_fields.of_script(text_of(script))
    except SpecConfigError:  # not here, which is not this command's to say
        return dict(fields), []
    return {**({MODEL: model} if model else {}), **fields}, refused


def _given(words: Sequence[str], unseen: list[str]) -> tuple[dict[str, Any], list[Objection]]:
    """Fields of the configuration that flags and the YAML file say, over TRL's defaults where nothing else can say them.

    And those that a recipe of TRL's does not have.
    """
    recipe = next((name for name in DEFAULTS if {name, f"trl.scripts.{name}"} & set(words)), "")
    flags, said = _flags(words), {}
    if file := flags.pop("config", None):
        try:
            said = _of_yaml(text_of(Path(str(file))))
            if not isinstance(said, dict):
                raise SpecConfigError(f"it holds {type(said).__name__}, and no fields with values")
        except SpecConfigError as error:
            unseen.append(f"--config {file}: it cannot be read: {error}")
            said = {}
    refused = [*trl_fields.unknown_flags({**said, **flags})] if recipe else []
    return {**DEFAULTS.get(recipe, OF_A_SCRIPT), **said, **flags}, refused


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--name``, as TRL's parser takes them."""
    found: dict[str, Any] = {}
    for word, behind in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            text = value if has_value else "true" if behind.startswith("--") else behind
            try:
                found[name.replace("-", "_")] = None if text.lower() == "none" else _of_yaml(text)
            except SpecConfigError:  # whatever it is
                found[name.replace("-", "_")] = text
    return found


def _of_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # such as of a date that is none
        raise SpecConfigError(" ".join(str(error).split())) from error


def _dry_run(words: Sequence[str], spec: SpecConfig, unseen: list[str]) -> tuple[dict[str, Any], list[Objection]]:
    """What a script gives to its trainer, and what stands against that trainer, whatever its configuration.

    Args:
        words: the script, and its arguments.
        spec: our options.
        unseen: why it was not seen is added here.
    """
    print(f"{words[0]} runs up to the line that makes its trainer …", file=sys.stderr, flush=True)
    environment = os.environ | {flag.FLAG: flag.joined(["1"], spec.model_dump(exclude_unset=True))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "spec_plugin_trl.dry_run", str(out), *words]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        if out.exists():
            answered = json.loads(text_of(out))
            objections = [Objection(**one) for one in answered["objections"]]
            return {**answered["fields"], MODEL: answered["model"]}, objections
    said = (
        ran.stderr.strip().rpartition("\n")[2] if ran.returncode else "it made no GRPOTrainer or RLOOTrainer of TRL's"
    )
    refused = [*trl_fields.unexpected(said)]
    if not refused:
        unseen.append(f"{words[0]}: its dry run ended before it made a trainer: {said}")
    return {}, refused


def _target(fields: Mapping[str, Any], model: Model) -> TargetInfo:
    hf = dict(model.config or {})
    own = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    return TargetInfo(
        path=model.name,
        hf_config=hf,
        dtype="float16" if own == "float32" else str(own),  # vLLM's "auto"
        max_num_seqs=0,
        max_model_len=length if isinstance(length := fields.get("vllm_max_model_length"), int) else None,
        sampling=options.sampling_of(fields.get),
    )


def _notes(fields: Mapping[str, Any]) -> Iterator[str]:
    yield "the engine is always asked for log-probs, so that there is evidence where TRL wants none"
    if fields.get("vllm_enable_sleep_mode"):
        yield "the engine sleeps at level 1 where TRL asks for level 2, which would drop the draft: its weights lie on the host"
