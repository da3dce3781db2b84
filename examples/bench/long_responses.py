"""Responses of thousands of tokens in the minimal adapter: when drafting begins, and acceptance by position within the response.

A tiny policy that goes on without an end, a real vLLM engine, no draft to start from. Two runs: responses of --short tokens, and
of --long ones. Behind the long run the draft is measured by position, thousand by thousand: in training's own replay of the
last responses, and in the engine, from how many tokens each step hands out.

    python examples/bench/long_responses.py --out runs/long-responses
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/minimal_adapter")]

from minimal_adapter import cpu  # noqa: E402
from minimal_adapter.adapter import MinimalAdapter  # noqa: E402
from minimal_adapter.loop import Settings  # noqa: E402
from spec_plugin_conformance.tiny import make_target  # noqa: E402

from draft_training.parts import Part  # noqa: E402
from spec_plugin.api.speculation import Speculation  # noqa: E402

THOUSAND = 1000


class Measured(MinimalAdapter):
    """The adapter, which behind its last step measures the draft by position before the engine is closed."""

    found: dict[str, Any]

    def sync(self) -> None:
        super().sync()
        print(f"step {self.step}", flush=True)
        if self.step == self.settings.steps:
            self.found = {"engine": self._in_the_engine(), "replay": self._in_the_replay()}

    def _in_the_engine(self) -> dict[int, float]:
        """Tokens of a step by the thousand in which it began, of responses that are drafted for throughout."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        k, tokens, steps = self.spec.session.config.k, defaultdict(int), defaultdict(int)
        params = SamplingParams(
            **self.sampling, max_tokens=self.settings.max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

        async def one(index: int, prompt: list[int]) -> None:
            at = 0
            async for output in self.engine.llm.generate({"prompt_token_ids": prompt}, params, f"by-position-{index}"):
                new = len(output.outputs[0].token_ids)
                if at and new <= k + 1:  # more: two steps that were handed out together; the first is the prompt's
                    tokens[at // THOUSAND] += new
                    steps[at // THOUSAND] += 1
                at += new

        async def all_of_them() -> None:
            await self.fronts[0].set_schedule(_always(k, self.settings.max_num_seqs))
            await asyncio.gather(*(one(i, p) for i, p in enumerate(self.sample_prompts()[:: self.settings.group])))

        self.engine.run(all_of_them())
        return {place: tokens[place] / steps[place] for place in sorted(steps)}

    def _in_the_replay(self) -> dict[int, float]:
        training = self.spec.session.manager.get_plugin("trainer")
        trainer, buffer = training._trainer, training._buffer
        parts: dict[int, list[Part]] = defaultdict(list)
        for part in buffer.newest(1 << 30, 1 << 30):
            document = part.document
            for start in range(0, len(document), THOUSAND // 4):
                place = (document.offset + start) // THOUSAND
                parts[place].append(Part(document, start, min(len(document), start + THOUSAND // 4)))
        k = self.spec.session.config.k
        reports = {place: trainer.evaluate(found, k, 512) for place, found in sorted(parts.items())}
        return {place: report.acceptance_length for place, report in reports.items() if report.rounds >= 50}


def _always(k: int, most: int) -> Any:
    from spec_plugin.api.events import Schedule

    return Schedule((0, *[k] * most))


def run(settings: Settings) -> dict[str, Any]:
    """One run; its metrics, and what was measured behind it."""
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "metrics.jsonl").unlink(missing_ok=True)
    trainer = Measured(settings)
    trainer.run()
    steps = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    drafted = [
        step.get("spec/state") in (Speculation.TRYING, Speculation.SERVING, Speculation.DROPPED) for step in steps
    ]
    first = next((i for i, on in enumerate(drafted) if on), None)
    sampled = settings.prompts * settings.group * settings.max_tokens
    return {
        "tokens of a response": settings.max_tokens,
        "tokens of a step": sampled,
        "steps before drafting": first,
        "tokens before drafting": None if first is None else first * sampled,
        "acceptance length": [round(step.get("spec/acceptance_length", 0.0), 2) for step in steps],
        "expected": [round(step.get("spec/expected_acceptance", 0.0), 2) for step in steps],
        "generate_s": [round(step["generate_s"], 2) for step in steps],
        "state": [step.get("spec/state") for step in steps],
        **{name: {str(i): round(v, 3) for i, v in found.items()} for name, found in trainer.found.items()},
    }


def main() -> None:
    """Both runs, and a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/long-responses")
    parser.add_argument("--short", type=int, default=48)
    parser.add_argument("--long", type=int, default=3300)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=("short", "long"))
    parser.add_argument("--k", type=int, default=3)
    options = parser.parse_args()
    cpu.prepare_process()
    target = make_target(options.out / "target", max_position_embeddings=4096, eos_token_id=None)
    base = Settings(target, options.out, options.steps, spec={"k": options.k}, group=2, max_num_seqs=8)
    found: dict[str, Any] = {}
    if options.only != "long":
        short = replace(
            base, out=options.out / "short", max_tokens=options.short, max_model_len=256, steps=4 * options.steps
        )
        found["short"] = run(short)
    if options.only != "short":
        found["long"] = run(replace(base, out=options.out / "long", max_tokens=options.long, max_model_len=4096))
    for name, row in found.items():
        print(name, json.dumps(row))
    (options.out / "result.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
