"""What a newborn draft makes of a real model's text: by the size of its vocabulary, and by how much its prompts teach it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, Sampled, TrainSettings  # noqa: E402
from draft_training.proposals import DRAFT_TEMPERATURES  # noqa: E402
from examples.bench import common, workload  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.real.policy import CACHE, policy  # noqa: E402
from examples.real.task import written  # noqa: E402
from spec_plugin.step_cost.chances import tokens_per_step  # noqa: E402

HELP = """Train newborn drafts on recorded rollouts of SmolLM2-135M, and replay them on rollouts that they have not seen.

\b
Arms are VOCABULARY:CONTEXT, e.g. 8192:1: tokens that the draft may propose (0: all), and how many tokens of the prompts teach a
young draft for each sampled one. Of each arm it tells, as training goes on: the share of held-out tokens that are in its
vocabulary, tokens a verification by its likeliest tokens and by the best draws, and seconds of training. No engine drafts here.
"""
K = 3


@dataclass(frozen=True)
class Point:
    """A draft after so many optimizer steps."""

    arm: str
    steps: int
    coverage: float  # of held-out sampled tokens
    greedy: float  # tokens a verification at k=3
    drawn: float  # the same by draws, at the best of the temperatures that are replayed
    temperature: float  # that one
    ceiling: float  # of a perfect draft that proposes the likeliest token
    entropy: float  # nats a token
    cpu_seconds: float  # of training


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--sharpness", default=2.0, help="The policy samples at T=1 as SmolLM2 does at 1 / SHARPNESS.")
@click.option("--arm", "arms", multiple=True, default=("0:1", "1024:1", "4096:1", "8192:1", "8192:4", "8192:0"))
@click.option("--prompts", default=48, help="Of the rollouts; 4 samples of each.")
@click.option("--tokens", default=200, help="Most of a response.")
@click.option("--steps", default=40, help="Optimizer steps.")
@click.option("--every", default=20, help="Optimizer steps between two looks.")
@click.option("--seed", default=0)
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(
    sharpness: float, arms: Sequence[str], prompts: int, tokens: int, steps: int, every: int, seed: int, out: Path
) -> None:
    """Sample, harvest, learn, report."""
    where = common.environment("cpu")
    common.prepare_process(1)
    from transformers import AutoModelForCausalLM

    folder = policy(sharpness)
    rows = recorded(folder, prompts, tokens)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = DraftConfig.from_target(model.config.to_dict())
    say(
        f"{len(rows)} rollouts of {sum(len(r) for _, r in rows)} sampled tokens; by default {config.fitting_vocabulary} tokens"
    )
    documents = workload.harvest(model, rows, config.aux_layers)
    points: list[Point] = []
    for arm in arms:
        points += learn(arm, model, documents, steps, every, seed)
    head = ["arm", "steps", "coverage", "greedy", "drawn", "at", "ceiling", "nats", "CPU s"]
    lines = [
        [
            *(p.arm, f"{p.steps}", f"{p.coverage:.4f}", f"{p.greedy:.2f}", f"{p.drawn:.2f}", f"{p.temperature:g}"),
            *(f"{p.ceiling:.2f}", f"{p.entropy:.2f}", f"{p.cpu_seconds:.0f}"),
        ]
        for p in points
    ]
    show(f"tokens a verification at k={K} on held-out text", head, lines)
    asked = {"sharpness": sharpness, "prompts": prompts, "tokens": tokens, "steps": steps, "seed": seed}
    common.write_results(f"real-drafts-{sharpness:g}", asked, [asdict(p) for p in points], where, out)


def recorded(folder: Path, prompts: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and of four responses to each, sampled by vLLM at temperature 1 on the first call."""
    file = CACHE / f"rollouts-{folder.name}-{prompts}-{tokens}.json"
    if not file.exists():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM, SamplingParams

        lines = (written() / "train.jsonl").read_text().splitlines()[:prompts]
        sizes = {"max_model_len": 256 + tokens, "max_num_seqs": 64, "kv_cache_memory_bytes": 2 << 30}
        llm = LLM(str(folder), dtype="float32", seed=0, enforce_eager=True, **sizes)
        tokenizer = llm.get_tokenizer()
        ids = [
            tokenizer.apply_chat_template(json.loads(x)["prompt"], add_generation_prompt=True, return_dict=False)
            for x in lines
        ]
        how = SamplingParams(n=4, temperature=1.0, max_tokens=tokens)
        answers = llm.generate([{"prompt_token_ids": i} for i in ids], how)
        rows = [(i, list(c.token_ids)) for i, answer in zip(ids, answers, strict=True) for c in answer.outputs]
        file.write_text(json.dumps([row for row in rows if len(row[1]) > 4]))
    return [(prompt, response) for prompt, response in json.loads(file.read_text())]


def learn(arm: str, model: object, documents: Sequence[Document], steps: int, every: int, seed: int) -> list[Point]:
    """Train one draft on three quarters of the rollouts; look at it on the others, which answer other prompts."""
    size, context = (float(x) for x in arm.split(":"))
    config = DraftConfig.from_target(model.config.to_dict(), draft_vocab_size=int(size) or None)  # type: ignore[attr-defined]
    held, rest = documents[: len(documents) // 4], documents[len(documents) // 4 :]
    settings = TrainSettings(ttt_steps=K, tokens_per_step=512, context_share=context)
    trainer = DraftTrainer(config, settings, device="cpu", seed=seed)
    embed, head = (get().weight for get in (model.get_input_embeddings, model.get_output_embeddings))  # type: ignore[attr-defined]
    trainer.update_policy(embed, head, 0)
    buffer = HiddenBuffer(1 << 30, 1 << 40, seed)
    for document in rest:
        buffer.add(document)
    coverage = 1.0
    if config.pruned:
        trainer.select_vocabulary(buffer.token_counts(config.vocab_size))
        sampled = torch.cat([d.input_ids[d.loss_mask.bool()] for d in held])
        known: torch.Tensor = trainer.draft.t2d  # type: ignore[assignment]
        coverage = float(known[sampled].float().mean())
    points, spent = [], 0.0
    for done in range(every, steps + 1, every):
        began = time.process_time()
        trainer.train_slice(buffer, 1e9, every)
        spent += time.process_time() - began
        found = trainer.evaluate(held, steps=K, sampling=Sampled()).proposals
        made = {t: tokens_per_step((*found.chances(t), 0.0), K) for t in DRAFT_TEMPERATURES}
        best = max((t for t in made if t), key=lambda t: made[t])
        ceiling = tokens_per_step((*found.ceiling, 0.0), K)
        points.append(Point(arm, done, coverage, made[0.0], made[best], best, ceiling, found.mean_entropy, spent))
        say(f"{arm}: {points[-1]}")
    return points


if __name__ == "__main__":
    main()
