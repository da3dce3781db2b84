"""Conversations of several turns in verl: what is accepted in each turn, and whole episodes with the flag and without.

    python examples/bench/agents.py accepted            the kit's calculator, eight steps, a few minutes
    python examples/bench/agents.py speed               the quickstart's policy, three sums a conversation, in turns of steps

The first counts, on any machine; the second times, and wants nothing beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # so that this file is found by path, from anywhere

from spec_plugin_conformance.driver import RunSettings  # noqa: E402
from spec_plugin_conformance.journal import read_trace  # noqa: E402

from examples.bench import common  # noqa: E402
from examples.bench.common import show  # noqa: E402

_ROLLOUT = "actor_rollout_ref.rollout"
#: vLLM says of each request what was accepted
_BY_REQUEST = f"++{_ROLLOUT}.engine_kwargs.vllm.per_request_spec_decode_metrics=summary"


@click.group(help=__doc__)
def main() -> None:
    """One of the two."""


@main.command(help="Tokens a verification by turn, in verl's own agent loop with a tool that the policy calls.")
@click.option("--steps", default=8, show_default=True)
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def accepted(steps: int, out: Path) -> None:
    """Run, read what the engine answered, report."""
    from spec_plugin_verl_cpu import conformance

    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        shape = conformance.SHAPES["agent"]
        conformance.SHAPES["agent"] = replace(shape, overrides=(*shape.overrides, _BY_REQUEST))
        driver = conformance.VerlDriver(Path(folder) / "kit", "agent")
        options = {
            "serve": "always",
            "train_share": 0.5,
            "self_test_seconds": 30,
            "plugins": [f"spec_plugin_conformance.recorder:Recorder={records}"],
        }
        list(driver.launch(RunSettings(Path(folder) / "run", steps, options=options)))
        rows = by_turn(read_trace(records), steps // 2)
    show(
        f"tokens a verification by turn, steps {steps // 2 + 1} to {steps}",
        ["turn", "requests", "verifications", "tokens of each"],
        [[str(turn), str(n), str(checks), f"{1 + kept / max(1, checks):.2f}"] for turn, n, checks, kept in rows],
    )
    asked = {"steps": steps}
    common.write_results(
        "agents-accepted", asked, [dict(zip(_NAMES, row, strict=True)) for row in rows], common.environment("cpu"), out
    )


_NAMES = ("turn", "requests", "verifications", "accepted")


def by_turn(trace: Iterable[Mapping[str, Any]], first: int) -> list[tuple[int, int, int, int]]:
    """Turn, requests, verification steps and tokens accepted in them, of the rollouts of policy version ``first`` and later."""
    turns: dict[tuple[int, ...], int] = {}  # a request's whole text -> its turn
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    version = -1
    for event in trace:
        version = event["policy_version"] if event["hook"] == "spec_rollout_start" else version
        if event["hook"] != "engine_request" or event["test"]:
            continue
        for ids, (checks, kept) in zip(event["sequences"], event["accepted"], strict=False):
            turn = 1 + max(
                (n for text, n in turns.items() if tuple(ids[: len(text)]) == text and len(text) <= event["prompt"]),
                default=0,
            )
            turns[tuple(ids)] = turn
            if version >= first:
                found[turn] = [a + b for a, b in zip(found[turn], (1, checks, kept), strict=True)]
    return [(turn, *found[turn]) for turn in sorted(found)]  # type: ignore[misc]


@main.command(help="The quickstart's policy in conversations of three sums, with the flag and without, in turns.")
@click.option("--steps", default=9, show_default=True)
@click.option("--out", default=Path("runs/agents"), show_default=True, type=click.Path(path_type=Path))
def speed(steps: int, out: Path) -> None:
    """The quickstart's own comparison, with another loop."""
    out.mkdir(parents=True, exist_ok=True)
    loops = out.absolute() / "loops.yaml"
    loops.write_text(json.dumps([{"name": "more_sums", "_target_": "spec_plugin_verl_cpu.two_turns.MoreSums"}]))
    command = [sys.executable, str(ROOT / "examples" / "quickstart" / "run.py"), "--compare", "--steps", str(steps)]
    command += ["--out", str(out.absolute()), f"{_ROLLOUT}.agent.agent_loop_config_path={loops}"]
    command += [f"{_ROLLOUT}.agent.default_agent_loop=more_sums", "data.max_response_length=288"]
    command += [f"{_ROLLOUT}.max_model_len=352"]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
