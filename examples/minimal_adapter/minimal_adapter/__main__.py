"""The command line: ``python -m minimal_adapter --target FOLDER --out FOLDER --steps 10 [--spec] [--spec.k 3 …]``."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
from pathlib import Path
from typing import Any

from minimal_adapter.loop import Settings

LOOP = "minimal_adapter.loop:Trainer"
ADAPTER = "minimal_adapter.adapter:MinimalAdapter"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="minimal_adapter", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--engines", type=int, default=Settings.engines)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--max-tokens", type=int, default=Settings.max_tokens)
    parser.add_argument("--dtype", default=Settings.dtype, help="of the engine; the policy is float32")
    parser.add_argument("--temperature", type=float, default=Settings.temperature)
    parser.add_argument("--loop", default=LOOP, help="module:Class, used without --spec")
    parser.add_argument("--spec", action="store_true", help="speculative rollouts; options as --spec.NAME VALUE")
    parser.add_argument("--adapter", default=ADAPTER, help="module:Class, used with --spec")
    known, rest = parser.parse_known_args()
    if len(rest) % 2 or any(not name.startswith("--spec.") for name in rest[::2]):
        parser.error(f"unrecognized arguments: {' '.join(rest)}; options of spec-plugin are written --spec.NAME VALUE")
    flag, chosen = known.spec, known.adapter if known.spec else known.loop
    if rest and not flag:
        parser.error("--spec.* options need --spec")
    del known.spec, known.adapter, known.loop
    options = {n.removeprefix("--spec."): value(v) for n, v in zip(rest[::2], rest[1::2], strict=True)}
    settings = Settings(**vars(known), spec=options)
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "metrics.jsonl").unlink(missing_ok=True)
    module, name = chosen.split(":")
    getattr(importlib.import_module(module), name)(settings).run()


def value(text: str) -> Any:
    """An option's value: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
