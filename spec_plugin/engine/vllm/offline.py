"""A vLLM engine in a process of its own, for ``spec-plugin train``: it samples the policy, or measures a draft.

Started as ``python -m spec_plugin.engine.vllm.offline TASK.json``, so that its memory is free again when it ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def sample(task: dict[str, Any]) -> None:
    """Sample a response to each prompt and append it to a file, a line each, going on behind the lines that are there.

    Args:
        task: ``target`` folder, ``prompts`` (token ids), ``out`` file, ``tokens`` (most of a response), ``temperature``,
            ``seed``, ``chunk`` (prompts between two writes) and ``engine`` options of vLLM.
    """
    done = lines_of(Path(task["out"]))
    prompts = task["prompts"][done:]
    if not prompts:
        return
    llm = _engine(task)
    with Path(task["out"]).open("a") as out:
        for begin in range(0, len(prompts), task["chunk"]):
            part = prompts[begin : begin + task["chunk"]]
            made = _generate(llm, part, task, first_seed=task["seed"] + done + begin)
            for prompt, ids in zip(part, made, strict=True):
                out.write(json.dumps({"prompt": prompt, "response": ids}) + "\n")
            out.flush()


def measure(task: dict[str, Any]) -> None:
    """Serve a draft on prompts and write what vLLM counted: ``drafts`` and ``accepted_per_pos``.

    Args:
        task: as for ``sample``, and ``speculative``, vLLM's speculative_config; k is the same for every batch size.
    """
    from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
    from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER

    k = task["speculative"]["num_speculative_tokens"]
    always = {"num_speculative_tokens_per_batch_size": [(1, task["engine"].get("max_num_seqs", 64), k)]}
    speculative = task["speculative"] | always
    llm = _engine(task, speculative_config=speculative, scheduler_cls=SCHEDULER, disable_log_stats=False)
    before = read_spec_counters()
    _generate(llm, task["prompts"], task, first_seed=task["seed"] + (1 << 20))  # other samples than those trained on
    after = read_spec_counters()
    old = [*before["accepted_per_pos"], *[0] * k]
    per_pos = [a - b for a, b in zip(after["accepted_per_pos"], old, strict=False)]
    found = {"drafts": after["drafts"] - before["drafts"], "accepted_per_pos": per_pos}
    Path(task["out"]).write_text(json.dumps(found))


def lines_of(file: Path) -> int:
    """Number of whole lines in a file; a cut-off last one is removed from it."""
    if not file.exists():
        return 0
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with file.open("r+b") as out:
            out.truncate(len(whole))
    return whole.count(b"\n")


def _engine(task: dict[str, Any], **options: Any) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    eager = {"enforce_eager": True} if current_platform.is_cpu() else {}
    extension = "spec_plugin.engine.vllm.extension.SpecWorkerExtension"
    return LLM(
        model=task["target"],
        worker_extension_cls=extension,
        enable_prefix_caching=False,
        **{**eager, **task["engine"], **options},
    )


def _generate(llm: Any, prompts: Sequence[Sequence[int]], task: dict[str, Any], first_seed: int) -> list[list[int]]:
    """A response to each prompt, each with a seed of its own: with one for all, equal prompts would get equal responses."""
    from vllm import SamplingParams

    length, heat = task["tokens"], task["temperature"]
    params = [
        SamplingParams(max_tokens=length, temperature=heat, seed=first_seed + i, detokenize=False)
        for i in range(len(prompts))
    ]
    made = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in made]


def main() -> None:
    """Run the task in the JSON file named on the command line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process: nothing can be left behind
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    task = json.loads(Path(sys.argv[1]).read_text())
    {"sample": sample, "measure": measure}[task["do"]](task)


if __name__ == "__main__":
    main()
