"""Training and validation prompts of the quickstart, as the parquet files that verl reads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pandas as pd

from examples.quickstart_verl.policy import PolicySettings, problem, question

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
