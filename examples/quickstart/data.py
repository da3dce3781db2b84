"""Training and validation prompts of the quickstart, as the files that each trainer reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd

from examples.quickstart.policy import PolicySettings, problem, question

DATA_SOURCE = "column_addition"


def rows(split: str, count: int, digits: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """Prompts in verl's schema; the split is part of the seed, so that training and validation differ."""
    rng = random.Random(f"{split} {seed}")
    table = []
    for index in range(count):
        a, b = problem(rng, rng.choice(digits))
        table.append(
            {
                "data_source": DATA_SOURCE,
                "prompt": question(a, b),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return table


def build_data(out: Path, settings: PolicySettings, train: int = 1024, val: int = 32) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet`` into ``out``; the same settings give the same files."""
    out.mkdir(parents=True, exist_ok=True)
    files = out.absolute() / "train.parquet", out.absolute() / "val.parquet"
    for file, split, count in zip(files, ("train", "val"), (train, val), strict=True):
        pd.DataFrame(rows(split, count, settings.digits, settings.seed)).to_parquet(file)
    return files


def build_openrlhf_data(out: Path, settings: PolicySettings, count: int = 1024, epochs: int = 1) -> Path:
    """Write verl's training prompts as ``openrlhf.jsonl``, so often one after the other: a chat and the sum as its label."""
    out.mkdir(parents=True, exist_ok=True)
    file = out.absolute() / "openrlhf.jsonl"
    records = rows("train", count, settings.digits, settings.seed) * epochs
    lines = [{"prompt": r["prompt"], "label": r["reward_model"]["ground_truth"]} for r in records]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
