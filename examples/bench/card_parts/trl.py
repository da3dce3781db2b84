"""Part 2: GRPO in TRL on this machine, with the flag and without, in turns: what a user of a trainer gains from a newborn draft.

The policy is a small one whose text has an entropy that is asked for, embedded exactly in a large shape (large.py); it never
ends a response. The draft is newborn and learns in the run, as everybody's first draft does.
"""

from __future__ import annotations

import math
import os
import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from spec_plugin_conformance import tiny
from spec_plugin_conformance.driver import RunFailed
from spec_plugin_conformance.launch import PREFIX
from spec_plugin_trl_cpu.run import TrlCpuRun
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_training.checkpoint import replacing_folder
from examples.bench import large
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import GrpoSizes, Models, sizes_of
from examples.bench.common import say
from examples.bench.turns import Contestant, TurnsError, in_turns
from examples.quickstart.side_by_side import KINDS, row, sums, tell
from examples.quickstart.trainers import TRAINERS

TRAINER = TRAINERS["trl"]
#: of the log of a run, in its record
LOG_LINES = 60


def measure(record: Record, models: Models | None) -> None:
    """Both runs for each entropy that was asked for."""
    sizes = sizes_of(record).grpo
    for nats in record.settings["nats"]:
        if record.enough_for(240.0 if record.settings["cuda"] else 60.0, f"GRPO at {nats:g} nats a token"):
            _in_turns(record, sizes, nats)


def _in_turns(record: Record, sizes: GrpoSizes, nats: float) -> None:
    work = Path(record.settings["work"])
    os.environ["SPEC_BENCH_WORK"] = str(work)  # seen behind a /tmp of a run's own, see ``turns``
    policy, found_nats = _policy(record, sizes, nats)
    out = record.file.parent.absolute() / f"trl-{nats:g}"
    shutil.rmtree(out, ignore_errors=True)
    data, reward = tiny.write_jsonl(work / "prompts.jsonl", 256), tiny.write_reward(work)
    runs = {
        kind: TrlCpuRun(
            policy, data, reward, out / kind, sizes.steps, kind == "plain", settings=_settings(record, sizes)
        )
        for kind in KINDS
    }
    both = [Contestant(kind, run.launch(), run.records) for kind, run in runs.items()]
    record.row(kind="policy", nats=found_nats, **asdict(sizes))
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    try:
        with closing(in_turns(both, sizes.steps, out, None, say, sizes.each)) as rounds:
            for last in rounds:
                for run in both:
                    fresh = [row(step, TRAINER) for step in run.steps[len(rows[run.name]) :]]
                    rows[run.name] += fresh
                    for found in fresh:
                        known = {name: value for name, value in found.items() if value is not None}
                        record.row(kind="grpo", nats=found_nats, run=run.name, **known)
                if last < sizes.steps and not record.enough_for(_round_s(rows, sizes.each), f"steps behind {last}"):
                    break
    except (TurnsError, RunFailed) as error:
        record.row(kind="run lost", nats=found_nats, reason=str(error)[-4000:])
    finally:
        for kind, run in runs.items():
            _log(record, kind, run.launch().log_file)
    _sums(record, found_nats, rows)


def _round_s(rows: dict[str, list[dict[str, Any]]], each: int) -> float:
    """Seconds that one more turn of both will take, by their last step."""
    return each * sum(of[-1]["step_s"] for of in rows.values())


def _sums(record: Record, nats: float, rows: dict[str, list[dict[str, Any]]]) -> None:
    whole = min(map(len, rows.values()))
    if whole > 1:
        both = {kind: of[:whole] for kind, of in rows.items()}
        found = sums(both)
        tell(both, found, say)
        record.row(kind="sums", nats=nats, **asdict(found))


def _log(record: Record, run: str, file: Path) -> None:
    """What of a run's log speaks of spec-plugin, and its end."""
    if file.exists():
        lines = [PREFIX.sub("", line) for line in file.read_text(errors="replace").splitlines()]
        ours = [line for line in lines if "spec" in line.lower()][:LOG_LINES]
        record.row(kind="log", run=run, ours=ours, end=lines[-10:])


def _settings(record: Record, sizes: GrpoSizes) -> dict[str, Any]:
    """TRL's, for as many requests at once as a step has sequences."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.sequences // sizes.micro_batch,
        "num_generations": sizes.samples,
        "max_completion_length": sizes.tokens,
        "vllm_max_model_length": sizes.tokens + 64,
        "learning_rate": 1e-6,
    }
    if record.settings["cuda"]:
        settings |= {
            "use_cpu": False,
            "bf16": True,
            "gradient_checkpointing": True,
            "vllm_gpu_memory_utilization": 0.15,
            "model_init_kwargs": {"dtype": "bfloat16"},
        }
    return settings


def _policy(record: Record, sizes: GrpoSizes, nats: float) -> tuple[Path, float]:
    """A folder with the policy in the large shape, and the entropy of its text in nats a token."""
    work = Path(record.settings["work"])
    small = work / f"chain-{nats:g}"
    if not small.exists():
        work.mkdir(parents=True, exist_ok=True)
        with replacing_folder(small) as fresh:
            tiny.make_target(fresh, num_key_value_heads=2, max_position_embeddings=1 << 15)
            tiny.go_on(fresh)
            heat(fresh, nats)
    found = entropy(_logits(small))
    constant = tiny.HIDDEN - 1  # see ``tiny.go_on``
    return large.embedded_target(small, large.SHAPES[sizes.shape], record.settings["dtype"], work, constant), found


def heat(folder: Path, nats: float) -> None:
    """Scale a policy's logits, in place, so that its text has that entropy.

    Args:
        folder: of the policy.
        nats: a token, in the mean over contexts of tokens that are all as likely, as this policy's are.

    Raises:
        ValueError: if no scale between 1/8 and 8 gives it.
    """
    logits = _logits(folder)
    low, high = 1 / 8, 8.0  # the larger the scale, the smaller the entropy
    if not entropy(high * logits) <= nats <= entropy(low * logits):
        raise ValueError(
            f"{nats:g} nats a token are out of reach: this policy's text can have {entropy(high * logits):.2g} to "
            f"{entropy(low * logits):.2g}"
        )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if entropy(middle * logits) < nats else (middle, high)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * low
    save_file(tensors, file, {"format": "pt"})


def entropy(logits: Tensor) -> float:
    """Mean entropy in nats of the distributions with these logits [..., V]."""
    log_p = logits.float().log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum(-1).mean())


def _logits(folder: Path) -> Tensor:
    """[positions, V], behind some tokens of context, all tokens as likely."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(2, tiny.VOCAB, (16, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(ids).logits[:, 16:].flatten(0, 1)
    return found
