"""Prompt tokens that an engine reads anew because it is built to draft, for groups of samples of one prompt and for turns.

    python examples/bench/prefix_cache.py
    python examples/bench/prefix_cache.py --block-size 16 --prompt 288

vLLM leaves out the last block of each hit in the prefix cache of an engine with a draft that reads the policy's hidden states,
also where no batch size drafts (vLLM issue 53670). Tokens are counted, nothing is timed; each engine has a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # so that this file is found by path, from anywhere

import click  # noqa: E402

GROUP, PROMPTS = 8, 4  # samples of each prompt
TURNS, ANSWER, QUESTION = 4, 32, 96  # of each conversation; tokens
#: engines: what each is built with besides
ENGINES = {
    "without the flag": {},
    "flag, no batch size drafts": {"k": 0},
    "flag, k=3": {"k": 3},
    "flag, k=3, blocks kept": {"k": 3, "disable_eagle_block_drop": True},
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of all requests of one workload."""

    prompt_tokens: int
    cached_tokens: int
    counted: int  # by the step log, see ``RolloutStats.recomputed_tokens``
    texts: list[list[int]]

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Engine:
    """One in this process, of a tiny policy, greedy."""

    def __init__(self, folder: Path, block_size: int, k: int | None = None, **speculation: Any) -> None:
        """``k``: None: without the flag."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        from vllm import LLM

        from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER

        options: dict[str, Any] = {}
        if k is not None:
            draft = {"method": "eagle3", "model": str(folder / "draft"), "num_speculative_tokens": 3, **speculation}
            options = {
                "speculative_config": {**draft, "num_speculative_tokens_per_batch_size": [(1, 64, 3)]},
                "scheduler_cls": SCHEDULER,
                "worker_extension_cls": "spec_plugin.engine.vllm.extension.SpecWorkerExtension",
            }
        self.llm = LLM(
            model=str(folder / "target"),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=64,
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=block_size,
            num_gpu_blocks_override=65_536 // block_size,
            **options,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        if k is not None:
            self.core.spec_set_schedule([k] * 65)
            self.core.spec_pause(k == 0)

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Counts:
        """All at once."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        found = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        counted = 0
        if hasattr(self.core, "spec_take_steps"):
            self.core.spec_take_steps()
            counted = self.core.spec_rest_of_steps()[-1][1]
        cached = sum(output.num_cached_tokens for output in found)
        return Counts(sum(map(len, prompts)), cached, counted, [list(o.outputs[0].token_ids) for o in found])


def _text(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i) % 128 for i in range(length)]


def groups(engine: Engine, length: int) -> Counts:
    """``GROUP`` samples of each of ``PROMPTS`` prompts."""
    return engine.run([_text(i, length) for i in range(PROMPTS) for _ in range(GROUP)], ANSWER)


def turns(engine: Engine, length: int) -> Counts:
    """Conversations, each turn with all of those before it as its prompt."""
    said = [_text(100 + i, length) for i in range(PROMPTS)]
    rounds = []
    for turn in range(TURNS):
        rounds.append(engine.run(said, ANSWER))
        said = [
            s + answer + _text(1000 + 10 * turn + i, QUESTION)
            for i, (s, answer) in enumerate(zip(said, rounds[-1].texts, strict=True))
        ]
    totals = (sum(getattr(r, name) for r in rounds) for name in ("prompt_tokens", "cached_tokens", "counted"))
    return Counts(*totals, [text for r in rounds for text in r.texts])


def make_models(folder: Path) -> None:
    """A policy of three layers and a draft that knows nothing."""
    import torch
    from spec_plugin_conformance import tiny

    from draft_training.config import DraftConfig
    from draft_training.eagle3 import save_draft
    from draft_training.model import Eagle3Draft

    tiny.make_target(folder / "target", num_hidden_layers=3, max_position_embeddings=1024)
    config = DraftConfig.from_target(json.loads((folder / "target" / "config.json").read_text()))
    empty = Eagle3Draft(config, device="meta").state_dict()
    save_draft(folder / "draft", config, {n: 0.05 * torch.ones(t.shape) for n, t in empty.items()})


def takes(option: str) -> bool:
    """Has the installed vLLM's ``SpeculativeConfig`` this field."""
    from vllm.config import SpeculativeConfig

    return option in {field.name for field in dataclasses.fields(SpeculativeConfig)}


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option(
    "--block-size", default=128, help="Tokens of a block of the KV cache; 128 is a CPU's default, 16 a GPU's."
)
@click.option("--prompt", "length", default=288, help="Tokens of a first prompt.")
@click.option("--engine", type=click.Choice(list(ENGINES)), hidden=True)
@click.option("--models", type=Path, hidden=True)
def main(block_size: int, length: int, engine: str | None, models: Path | None) -> None:
    """Start each engine in a process of its own, and compare."""
    if engine is not None and models is not None:
        one = Engine(models, block_size, **ENGINES[engine])  # type: ignore[arg-type]
        print(json.dumps([dataclasses.asdict(work(one, length)) for work in (groups, turns)]))
        return
    from examples.bench.common import RESULTS, environment, show, write_results

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        plain: list[Counts] = []
        for name, options in ENGINES.items():
            if "disable_eagle_block_drop" in options and not takes("disable_eagle_block_drop"):
                continue
            again = [sys.executable, __file__, "--engine", name, "--models", folder]
            again += ["--block-size", str(block_size), "--prompt", str(length)]
            done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
            found = [Counts(**counts) for counts in json.loads(done.stdout.splitlines()[-1])]
            plain = plain or found
            for work, counts, without in zip(("groups", "turns"), found, plain, strict=True):
                rows.append(
                    {
                        "engine": name,
                        "workload": work,
                        "prompt tokens": counts.prompt_tokens,
                        "computed": counts.computed,
                        "more than without the flag": counts.computed - without.computed,
                        "counted by the step log": counts.counted,
                        "same text": counts.texts == without.texts,
                    }
                )
    about = (
        f"{PROMPTS} prompts of {length} tokens, blocks of {block_size}: {GROUP} samples of each; {TURNS} turns of each"
    )
    show(about, list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    settings = {"block_size": block_size, "prompt": length, "group": GROUP, "turns": TURNS}
    write_results("prefix-cache", settings, rows, environment("cpu"), RESULTS)


if __name__ == "__main__":
    main()
