"""A user's script: GRPO or RLOO with TRL, as its documentation writes it; it knows nothing of spec-plugin."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends what TRL logs of each step to ``metrics.jsonl``."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the step's clock; TRL's own, ``step_time``, leaves out what callbacks do behind the update."""
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """One line for each step."""
        if logs and "loss" in logs and state.is_world_process_zero:
            with self.file.open("a") as out:
                seconds = time.perf_counter() - self.began
                out.write(json.dumps({"step": state.global_step, "step_wall_s": seconds, **logs}) + "\n")


def timed(trainer: Any) -> None:
    """Have TRL log how long each of its generations takes, which by itself it tells wandb only."""
    generate = trainer.vllm_generation.generate

    def generate_on_the_clock(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = generate(*args, **kwargs)
        trainer._metrics["train"]["generation_s"].append(time.perf_counter() - began)
        return found

    trainer.vllm_generation.generate = generate_on_the_clock


def main(argv: Sequence[str] | None = None) -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a prompt and a label")
    parser.add_argument("--reward", type=Path, required=True, help="a file with a function reward(completion, label)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume")
    parser.add_argument("--trainer", choices=["grpo", "rloo"], default="grpo")
    parser.add_argument("--peft", action="store_true", help="train a LoRA adapter")
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    parser.add_argument(
        "--tools", nargs="*", default=[], metavar="MODULE:FUNCTION", help="tools that the policy may call"
    )
    parser.add_argument("--environment", metavar="MODULE:CLASS", help="an environment whose methods are tools")
    parser.add_argument("--rollouts", metavar="MODULE:FUNCTION", help="a rollout_func")
    parser.add_argument("--evaluate", action="store_true", help="evaluate on the first four rows")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="a field of the configuration")
    a = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    a.out.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.spec_from_file_location("reward", a.reward)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(completions: Sequence[Any], label: Sequence[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else "".join(m.get("content") or "" for m in c) for c in completions]
        return [float(module.compute_score("", text, of)) for text, of in zip(texts, label, strict=True)]

    rows = [json.loads(line) for line in a.data.read_text().splitlines()]
    settings: dict[str, Any] = {
        "output_dir": str(a.out / "checkpoints"),
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "gradient_checkpointing": False,
        "max_steps": a.steps,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        **{name: json.loads(value) for name, value in (word.split("=", 1) for word in a.set)},
    }
    peft = None
    if a.peft:
        from peft import LoraConfig

        peft = LoraConfig(r=8, lora_dropout=a.lora_dropout, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    more: dict[str, Any] = {"tools": [resolve_name(name) for name in a.tools]} if a.tools else {}
    more |= {"environment_factory": resolve_name(a.environment)} if a.environment else {}
    more |= {"rollout_func": resolve_name(a.rollouts)} if a.rollouts else {}
    config, trainer = (GRPOConfig, GRPOTrainer) if a.trainer == "grpo" else (RLOOConfig, RLOOTrainer)
    run = trainer(
        model=a.model,
        reward_funcs=reward,
        args=config(**settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]) if a.evaluate else None,
        callbacks=[MetricsFile(a.out / "metrics.jsonl")],
        peft_config=peft,
        **more,
    )
    timed(run)
    run.train(resume_from_checkpoint=a.resume)


if __name__ == "__main__":
    main()
