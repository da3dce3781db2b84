"""Stories that must use given words, as chats: answers of some hundred tokens, whose reward a rule can tell."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pandas as pd

from examples.real.policy import CACHE

WORDS = (  # noqa: SIM905 - ninety quoted words are no easier to read
    "anchor apple basket bell bicycle blanket boat bottle bread bridge broom bucket butterfly candle carpet castle chair cheese "
    "clock cloud coat coin compass cup desk door drum feather fence flute forest fox garden glass glove goat hammer harbour hat "
    "honey island jar kettle key kite ladder lamp lantern lemon letter lion map market mirror moon mountain needle nest oven owl "
    "paint paper pencil piano pillow pocket pond rabbit radio rain river road rope sail salt scarf ship shoe snow spoon star "
    "stone storm sugar table tent ticket tower train tree trumpet tunnel umbrella valley violin wagon wheel whistle window wolf"
).split()
TOPICS = (
    "a journey by night",
    "two friends who disagree",
    "a lost letter",
    "a teacher and her class",
    "the last day of summer",
    "a mistake that turned out well",
    "a village by the sea",
    "an old machine",
    "a promise",
    "a visit to the city",
    "a small shop",
    "a long winter",
)
_WANTED = 3


def questions(count: int, split: str) -> list[dict[str, Any]]:
    """Prompts in verl's schema, other ones for training and validation; the words that a story must use are its ground truth."""
    rng = random.Random(f"{split} 1")
    rows = []
    for index in range(count):
        words = rng.sample(WORDS, _WANTED)
        asked = (
            f"Write a story about {rng.choice(TOPICS)}. Use the words {', '.join(words[:-1])} and {words[-1]} in it."
        )
        rows.append(
            {
                "data_source": "stories",
                "prompt": [{"role": "user", "content": asked}],
                "ability": "writing",
                "reward_model": {"style": "rule", "ground_truth": " ".join(words)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return rows


def written(count: int = 256, cache: Path = CACHE) -> Path:
    """A folder with train.jsonl (a chat and its words as its label: TRL, OpenRLHF), train.parquet and val.parquet (verl)."""
    out = cache / f"stories-{count}"
    if not (out / "train.jsonl").exists():
        out.mkdir(parents=True, exist_ok=True)
        train = questions(count, "train")
        pd.DataFrame(questions(32, "val")).to_parquet(out / "val.parquet")
        pd.DataFrame(train).to_parquet(out / "train.parquet")
        lines = [{"prompt": row["prompt"], "label": row["reward_model"]["ground_truth"]} for row in train]
        (out / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out
