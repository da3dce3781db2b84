"""``spec-plugin train``: sample, train, measure; a killed call is resumed by the same one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from draft_training import files
from draft_training.acceptance import conditional_acceptance
from draft_training.errors import CheckpointError
from draft_training.outside import short_repr, text_part
from spec_plugin.api.diagnosis import device_type
from spec_plugin.api.errors import SpecConfigError, SpecPluginError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.commands.terminal import progress_bar
from spec_plugin.commands.train.settings import PretrainSettings
from spec_plugin.commands.train.texts import TokenizedRollout, read_prompts, read_rollouts
from spec_plugin.engine.vllm.offline import lines_of
from spec_plugin.lifecycle.manager import built_in_method
from spec_plugin.plan.refusals import read_json, refusing

#: prompts sampled between two writes: what a kill costs at most
_CHUNK = 64
#: of a target
_DTYPES = ("float32", "bfloat16", "float16")
#: most rollouts that are kept from training, to predict and to measure acceptance on
_HELD_OUT = 64


@dataclass(frozen=True)
class TrainedDraft:
    """How many tokens of a trained draft are accepted, by its training and by the engine."""

    predicted: tuple[float, ...]  # [k] chance of each drafted token, given those before it, on rollouts not trained on
    measured: tuple[float, ...]  # the same, by the engine, on samples of the same prompts


def pretrain(settings: PretrainSettings, show: bool = True) -> TrainedDraft:
    """Train a draft; ``settings.out`` appears when it is whole.

    What is done lies in ``<out>.work`` until then; the same call goes on with it.

    Args:
        settings: what to do.
        show: draw progress bars.

    Raises:
        SpecConfigError: before anything has started: what is wrong with the settings, and what to do.
        SpecPluginError: if the engine's process failed.
    """
    _check(settings)
    target = _target(settings)
    _refuse_too_large(settings, target)
    method = built_in_method(settings.spec, target, fetch=True)
    assert method is not None, "the default one is ours"
    begun = _work_of(settings).exists()
    work = _work_folder(settings)
    try:
        rollouts = _rollouts(settings, target, work, show)
        held_out, training = _split(rollouts)
    except SpecConfigError:
        if not begun:  # what is refused leaves nothing behind
            shutil.rmtree(work, ignore_errors=True)
        raise

    from spec_plugin.commands.train.loop import train  # torch, which takes seconds

    predicted = train(settings, target, method, training, held_out, work, show)
    measured = _measured(settings, work, held_out, method)
    outcome = TrainedDraft(predicted, measured)
    _finish(settings, work, outcome, len(rollouts))
    return outcome


def _check(settings: PretrainSettings) -> None:
    if bool(settings.prompts) == bool(settings.rollouts):
        raise SpecConfigError("give either --prompts to sample from, or existing --rollouts; not both, not neither")
    if not 0 < settings.temperature < math.inf:  # NaN is neither
        raise SpecConfigError(f"--temperature {settings.temperature}: expected a number above 0, as in the run to come")
    if not 0 < settings.gpu_memory_utilization <= 1:
        raise SpecConfigError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization}: expected a share, above 0 to 1"
        )
    try:
        if not (settings.target / "config.json").exists():
            raise SpecConfigError(
                f"--target {settings.target}: no config.json there; give the policy's checkpoint folder"
            )
        if settings.out.exists():
            raise SpecConfigError(f"--out {settings.out} exists; remove it, or give another folder")
    except OSError as error:
        raise SpecConfigError(
            f"--target {settings.target} or --out {settings.out}: {error}; give another folder"
        ) from error


def _target(settings: PretrainSettings) -> TargetInfo:
    file = settings.target / "config.json"
    hf = read_json(file)
    dtype = next((p[n] for p in (hf, text_part(hf)) for n in ("dtype", "torch_dtype") if p.get(n)), "float32")
    if dtype not in _DTYPES:
        raise SpecConfigError(
            f"torch_dtype={short_repr(dtype)} in {file}: a draft is written in the target's dtype, one of {', '.join(_DTYPES)}; "
            "correct it there"
        )
    return TargetInfo(path=str(settings.target), hf_config=hf, dtype=dtype)


def _refuse_too_large(settings: PretrainSettings, target: TargetInfo) -> None:
    """Engine and training hold the whole policy on one device, one after the other: no rank shares it."""
    with refusing(f"--target {settings.target}"):
        weights = sum(file.stat().st_size for file in files.weight_files(settings.target) if file.is_file())
    memory = _card_memory()
    place, share = ("a GPU", settings.gpu_memory_utilization) if memory else ("this machine", 0.9)
    if not memory:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        weights *= 1 if target.dtype == "float32" else 2  # training is in float32 there
    if weights > share * memory:
        raise SpecConfigError(
            f"--target {settings.target}: its weights take {weights / 1e9:.1f} GB, and {place} has {memory / 1e9:.1f} GB, of "
            f"which {share:.0%} may be theirs: spec-plugin train splits no policy over several; let the run train its draft, "
            "which needs none to begin with, or train on a larger device"
        )


def _card_memory() -> int:
    """Bytes of the GPU's memory; 0 where there is none."""
    if device_type() == "cpu":
        return 0
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def _work_of(settings: PretrainSettings) -> Path:
    return settings.out.with_name(f"{settings.out.name}.work")


def _work_folder(settings: PretrainSettings) -> Path:
    """Where what is done so far lies; refuses what another call with other settings has left."""
    work = _work_of(settings)
    now = json.loads(json.dumps(asdict(settings), default=str))
    settings_file = work / "settings.json"
    if settings_file.exists():
        before = _left(settings_file)
        other = [f"{key} ({before.get(key)!r}, now {now[key]!r})" for key in now if before.get(key) != now[key]]
        if other:
            raise SpecConfigError(
                f"{work} holds unfinished work with other settings: {', '.join(other)}; give those again to go on, or "
                "remove the folder to start over"
            )
    try:
        work.mkdir(parents=True, exist_ok=True)
        settings_file.write_text(json.dumps(now, indent=2))
    except OSError as error:
        raise SpecConfigError(f"--out {settings.out}: {error}; give a folder that can be written") from error
    return work


def _left(file: Path) -> dict[str, Any]:
    """A JSON file that an earlier call with this ``--out`` has left."""
    try:
        return files.read_json(file)
    except CheckpointError as error:
        raise SpecConfigError(f"{error}; remove {file.parent} to start over") from error


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises what it likes
        reason = " ".join(str(error).split())
        raise SpecConfigError(
            f"--target {folder}: its tokenizer cannot be loaded: {type(error).__name__}: {reason:.300}; put the policy's "
            "tokenizer files there"
        ) from error
    if not tokenizer(
        "a", add_special_tokens=False
    ).input_ids:  # transformers makes an empty one where there are no files
        raise SpecConfigError(f"--target {folder}: its tokenizer is empty; put the policy's tokenizer files there")
    return tokenizer


def _rollouts(settings: PretrainSettings, target: TargetInfo, work: Path, show: bool) -> list[TokenizedRollout]:
    tokenizer, vocabulary = _tokenizer(settings.target), target.vocab_size
    if settings.prompts is None:
        return read_rollouts(settings.rollouts, tokenizer, vocabulary)
    prompts = read_prompts(settings.prompts, tokenizer, vocabulary)
    asked = [prompts[i % len(prompts)] for i in range(settings.responses)]
    out = work / "rollouts.jsonl"
    if lines_of(out) < len(asked):
        task = _task(settings, asked, out) | {"chunk": _CHUNK}
        _in_engine("sample", task, work, len(asked) if show else 0)
    return read_rollouts([out], tokenizer, vocabulary)


def _split(rollouts: Sequence[TokenizedRollout]) -> tuple[list[TokenizedRollout], list[TokenizedRollout]]:
    """Up to ``_HELD_OUT`` rollouts of the prompts that are held out, as many of each as can be, and all rollouts of the others.

    Raises:
        SpecConfigError: if all answer the same prompt.
    """
    of_prompt: dict[tuple[int, ...], list[TokenizedRollout]] = {}
    for rollout in rollouts:
        of_prompt.setdefault(rollout.prompt, []).append(rollout)
    if len(of_prompt) < 2:
        raise SpecConfigError(
            "all rollouts answer one prompt, and one is held out to measure on: give at least two prompts"
        )
    held = dict(islice(of_prompt.items(), min(_HELD_OUT, max(1, len(of_prompt) // 10))))
    in_turn = chain.from_iterable(zip_longest(*held.values()))  # few prompts are answered often: more to measure on
    return (
        list(islice((r for r in in_turn if r is not None), _HELD_OUT)),
        [rollout for rollout in rollouts if rollout.prompt not in held],
    )


def _task(settings: PretrainSettings, prompts: list[list[int]], out: Path) -> dict[str, Any]:
    """What the engine's process is told, whatever it does."""
    return {
        "target": str(settings.target),
        "prompts": prompts,
        "out": str(out),
        "tokens": settings.tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "engine": {
            "seed": settings.seed,
            "max_num_seqs": _CHUNK,
            "max_model_len": max(map(len, prompts)) + settings.tokens + settings.k + 1,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "skip_tokenizer_init": True,
        },
    }


def _in_engine(do: str, task: dict[str, Any], work: Path, lines: int = 0) -> None:
    """Run a task in a process of its own; of one that writes so many lines with a bar."""
    file, log, written = work / f"{do}.json", work / f"{do}.log", Path(task["out"])
    file.write_text(json.dumps({"do": do, **task}))
    command = [sys.executable, "-m", "spec_plugin.engine.vllm.offline", str(file)]
    with log.open("w") as out, progress_bar("sampling from the policy", lines, lines > 0) as show_done:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
                if lines and written.exists():
                    done = written.read_bytes().count(b"\n")
                    show_done(done, f"{done}/{lines}")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SpecPluginError(
            f"the engine's process failed with exit code {process.returncode}; the last lines of {log}:\n{tail}"
        )


def _measured(
    settings: PretrainSettings, work: Path, held_out: list[TokenizedRollout], method: Method
) -> tuple[float, ...]:
    """What the engine accepts of the draft on the prompts that were not trained on."""
    out = work / "measured.json"
    if not out.exists():
        task = _task(settings, [list(r.prompt) for r in held_out], out)
        # as it was predicted; a run may find that draws are accepted more often
        speculative = dict(method.settings) | {"model": str(work / "draft"), "draft_sample_method": "greedy"}
        _in_engine("measure", task | {"speculative": speculative}, work)
    found = _left(out)
    return conditional_acceptance(found["accepted_per_pos"], found["drafts"])


def _finish(settings: PretrainSettings, work: Path, outcome: TrainedDraft, rollouts: int) -> None:
    about = {
        "settings": json.loads((work / "settings.json").read_text()),
        "rollouts": rollouts,
        "predicted_chances": outcome.predicted,
        "measured_chances": outcome.measured,
    }
    (work / "draft" / "training.json").write_text(json.dumps(about, indent=2))
    (work / "draft").rename(settings.out)
    shutil.rmtree(work)
