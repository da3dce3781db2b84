"""How the conformance kit runs real verl on a CPU: ``spec-plugin conformance verl``."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from PIL import Image
from spec_plugin_conformance import calculator, tiny
from spec_plugin_conformance.driver import ConformanceDriver, RunSettings
from spec_plugin_conformance.targets import tiny_targets
from spec_plugin_cpu import v2_runner
from torch import Tensor

from spec_plugin_verl_cpu import checkpoints
from spec_plugin_verl_cpu.run import (
    COLOCATE,
    FSDP,
    FULLY,
    MEGATRON,
    ONE_STEP,
    PPO,
    SEPARATE,
    SMALL,
    SMALL_TOKENS,
    SPEC,
    VEOMNI,
    Backend,
    Main,
    VerlRun,
)

_QUICK = ("actor_rollout_ref.actor.optim.lr_warmup_steps=0",)  # the first update must move the policy


_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
_TWO = ("trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=2")


@dataclass(frozen=True)
class Shape:
    """A deployment as people run it, in two processes of one machine."""

    what: str
    overrides: tuple[str, ...]
    ranks: int = 1  # of the actor
    nodes: int = 1  # of Ray
    family: str = "qwen3"  # of the policy
    mtp: bool = False  # has it a layer for multi-token prediction
    asynchronous: bool = False
    main: Main = PPO
    backend: Backend = FSDP
    format: checkpoints.Format = checkpoints.FSDP
    kv_heads: int = 1  # of the policy; ranks that split them need one each
    v2: bool = False  # has the engine vLLM's V2 model runner, with asynchronous scheduling, as on a card
    calls: bool = False  # does the policy call a tool
    tokens: int = SMALL_TOKENS  # of a response, at most; of a policy that never ends one if there are more than usual
    known: Mapping[str, str] = field(default_factory=dict)  # see ``ConformanceDriver.known_in``


def _megatron(
    what: str, *overrides: str, ranks: int = 2, family: str = "qwen3", known: Mapping[str, str] | None = None
) -> Shape:
    """A Megatron actor; its environment is not that of the other shapes."""
    split = _TWO if ranks > 1 else ()
    own = (f"{'+' * override.startswith('+')}{_ACTOR}.megatron.{override.lstrip('+')}" for override in overrides)
    return Shape(
        f"a Megatron actor, {what}",
        (*split, *own),
        ranks=ranks,
        backend=MEGATRON,
        format=checkpoints.MEGATRON,
        kv_heads=ranks,
        family=family,
        known=known or {},
    )


_TP = (
    f"{_ROLLOUT}.tensor_model_parallel_size=2",
    f"++{_ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=mp",
)

SHAPES = {
    "tp2": Shape(
        "two tensor parallel ranks in the engine, two FSDP2 ranks in the actor",
        (*_TWO, *_TP),
        ranks=2,
    ),
    "dp2": Shape("two replicas of the engine, two FSDP2 ranks in the actor", _TWO, ranks=2),
    "sleep": Shape(
        "the engine sleeps while the actor trains, with garbage in the memory that a card would free",
        (f"{_ROLLOUT}.free_cache_engine=True", f"++{_ROLLOUT}.enable_sleep_mode=True"),
    ),
    "nodes2": Shape("two Ray nodes: one replica of the engine and one FSDP2 rank on each", (), ranks=2, nodes=2),
    "lora": Shape(  # the reference is the actor without its adapters
        "LoRA, merged before each weight sync, with a KL term",
        (
            f"{_MODEL}.lora_rank=8",
            f"{_MODEL}.lora.merge=True",
            f"{_ACTOR}.use_kl_loss=True",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        ),
        known=dict.fromkeys(
            ("weights_arrive_as_they_are", "hidden_states_equal_a_plain_forward"),
            "verl sends merged weights in bfloat16, with the flag or without (_merged_lora_per_tensor_param)",
        ),
    ),
    "lora-adapters": Shape(
        "LoRA adapters in the engine, beside a base that it has read itself",
        (f"{_MODEL}.lora_rank=8", f"{_ROLLOUT}.load_format=safetensors"),
    ),
    "packed": Shape(
        "remove-padding, dynamic batch sizes, gradient checkpointing, offloading, log-probs that the trainer does not want",
        (
            f"{_ROLLOUT}.calculate_log_probs=False",
            f"{_MODEL}.use_remove_padding=True",
            f"{_MODEL}.enable_gradient_checkpointing=True",
            f"{_ACTOR}.use_dynamic_bsz=True",
            f"{_ACTOR}.ppo_max_token_len_per_gpu=512",
            f"{_ROLLOUT}.log_prob_use_dynamic_bsz=True",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu=512",
            f"{_ACTOR}.fsdp_config.param_offload=True",
            f"{_ACTOR}.fsdp_config.optimizer_offload=True",
        ),
    ),
    "agent": Shape(
        "verl's own agent loop with a tool that the policy calls, and up to three turns a response",
        (
            f"{_ROLLOUT}.agent.default_agent_loop=tool_agent",
            f"{_ROLLOUT}.multi_turn.enable=True",
            f"{_ROLLOUT}.multi_turn.format=hermes",
            f"{_ROLLOUT}.multi_turn.max_assistant_turns=3",
            f"{_ROLLOUT}.multi_turn.function_tool_path={Path(__file__).with_name('calculator_tool.py')}",
            "data.max_prompt_length=48",
        ),
        calls=True,
    ),
    "mistral": Shape("a Mistral policy", (), family="mistral"),
    "long": Shape(
        "responses of 1100 tokens, each of them: none fits into what a draft is measured on",
        (
            "data.max_response_length=1100",
            f"{_ROLLOUT}.max_model_len=1152",
            f"{_ROLLOUT}.max_num_batched_tokens=1152",
        ),
        tokens=1100,
    ),
    "colocate": Shape(
        "asynchronous, actor and engine in turn: rollouts are cut short for training, and go on under the next policy",
        COLOCATE,
        asynchronous=True,
    ),
    "separate": Shape(
        "asynchronous, actor and engine apart: rollouts go on while the actor trains, but for the weight sync",
        SEPARATE,
        asynchronous=True,
    ),
    "separate2": Shape(
        "the same with two FSDP2 ranks in the actor, and two engines",
        (*SEPARATE, "trainer.n_gpus_per_node=2", f"{_ROLLOUT}.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=4"),
        ranks=2,
        asynchronous=True,
    ),
    "one-step": Shape(
        "verl's one_step_off_policy: a batch is sampled while the one before is trained on",
        (),
        asynchronous=True,
        main=ONE_STEP,
    ),
    "fully": Shape("verl's fully_async_policy: prompts are sampled all the time", (), asynchronous=True, main=FULLY),
    "megatron": _megatron("one rank", ranks=1),
    "megatron-tp2": _megatron("tensor and sequence parallel over two ranks", "tensor_model_parallel_size=2"),
    "megatron-pp2": _megatron("a pipeline of two stages", "pipeline_model_parallel_size=2"),
    "megatron-cp2": _megatron(
        "context parallel over two ranks, packed sequences", "context_parallel_size=2", "use_remove_padding=True"
    ),
    "megatron-ep2": _megatron(
        "a mixture of experts over two ranks",
        "expert_model_parallel_size=2",
        "expert_tensor_parallel_size=1",
        "+override_transformer_config.moe_grouped_gemm=False",
        "+override_transformer_config.moe_permute_fusion=False",
        family="qwen3_moe",
        known={"weights_arrive_as_they_are": "vLLM's CPU kernel of experts rounds coarsely"},
    ),
    "veomni": Shape("a VeOmni actor of two ranks", _TWO, ranks=2, backend=VEOMNI),
    "v2": Shape(
        "vLLM's V2 model runner in Triton's interpreter, with asynchronous scheduling as on a card", (), v2=True
    ),
    "mimo": Shape("a Qwen2 policy with a layer for multi-token prediction", (), family="qwen2", mtp=True),
}


#: seconds of the self-test where Triton's interpreter runs the kernels, on a machine that does other things, too
_INTERPRETED = 150.0


class VerlDriver(ConformanceDriver):
    """GRPO on four prompts with four samples a step."""

    shapes: ClassVar = {name: shape.what for name, shape in SHAPES.items()}
    known_in: ClassVar = {name: shape.known for name, shape in SHAPES.items()}
    takes_families = True

    metric_prefix = "actor/"
    adapter_modules = ("spec_plugin_verl", "spec_plugin.lifecycle.session")
    trainer_modules = ("verl", "verl.workers.rollout", "verl.workers.engine")
    engine_version = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.global_steps"

    def __init__(self, root: Path, shape: str | None = None, family: str | None = None) -> None:
        """Write the tiny policy, the prompts and the reward under ``root``."""
        super().__init__(root, shape, family)
        self._shape = SHAPES[shape] if shape else Shape("", ())
        self.asynchronous = self._shape.asynchronous
        # of a response that goes on under the next policy, the rest
        most = self._shape.tokens
        several = self.asynchronous or self._shape.calls  # requests of one response
        self.requests = {"max_tokens": (1, most) if several else most}
        root.mkdir(parents=True, exist_ok=True)
        self._room = tiny_targets()[family or self._shape.family]
        split: dict[str, Any] = {"num_key_value_heads": self._shape.kv_heads} if self._shape.kv_heads > 1 else {}
        if most > SMALL_TOKENS:
            split["max_position_embeddings"] = 2048
        if self._shape.calls:
            self._target = calculator.make_target(root / "policy")
        else:
            self._target = tiny.make_target(root / "policy", family=family or self._shape.family, **split)
        if most > SMALL_TOKENS:
            tiny.go_on(self._target)
        if self._shape.mtp:
            tiny.add_mtp_layer(self._target)
        self._data = root / "data.parquet"
        rows = [_row(i, text) for i, text in enumerate(tiny.prompts(64))]
        if self._room.processor is not None:
            rows = [
                _with_image(i, row) if i % 2 or not self._room.mixed else {**row, "images": []}
                for i, row in enumerate(rows)
            ]
        pd.DataFrame(rows).to_parquet(self._data)
        self._reward = tiny.write_reward(root)

    @property
    def target(self) -> Path:
        """Folder of the tiny policy, in float32."""
        return self._target

    def _overrides(self, run: RunSettings) -> list[str]:
        out = [*SMALL, *_QUICK, *self._shape.overrides]
        if self._room.dtype != "float32":
            out.append(f"{_ROLLOUT}.dtype={self._room.dtype}")
        if self._room.attention != "sdpa":
            out.append(f"++{_MODEL}.override_config.attn_implementation={self._room.attention}")
        if self._room.processor is not None:
            out.append("data.max_prompt_length=40")  # an image is four tokens and two around them
        if run.save_every:
            out.append(f"trainer.save_freq={run.save_every}")
        if run.resume_from:
            checkpoints = run.resume_from.out / "checkpoints"
            step = (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip()
            out += [
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={checkpoints / f'global_step_{step}'}",
            ]
        if run.replay:
            steps = ",".join(str(i) for i in range(1, run.steps + 1))
            out += [
                "skip.rollout_tq.enable=True",
                f"skip.rollout_tq.steps=[{steps}]",
                f"skip.rollout_tq.dump_dir={run.replay}",
            ]
        options = dict(run.options) if run.enabled else {}
        if options and self._shape.v2:
            options["self_test_seconds"] = _INTERPRETED
        return out + [f"{SPEC}{name}={_word(value)}" for name, value in options.items()]

    def launch(self, run: RunSettings) -> Generator[tuple[int, dict[str, float]], None, None]:
        """One run of the shape's main, ``verl.trainer.main_ppo`` by default."""
        trainer = VerlRun(
            self._target,
            self._data,
            self._data,
            self._reward,
            run.out,
            run.steps,
            plain=not run.enabled,
            overrides=tuple(self._overrides(run)),
            nodes=self._shape.nodes,
            main=self._shape.main,
            backend=self._shape.backend,
            variables={
                **self._room.environment,
                **(v2_runner.environment(v2_runner.V2_ASYNC) if self._shape.v2 else {}),
            },
            first=(v2_runner.IN_FORCE,) if self._shape.v2 else (),
        )
        yield from trainer.follow()

    def _checkpoint(self, run: RunSettings, step: int) -> Path:
        return run.out / "checkpoints" / f"global_step_{step}" / "actor"

    def policy(self, run: RunSettings, step: int) -> dict[str, Tensor]:
        """From verl's checkpoint; with FSDP each rank's shard by itself."""
        return self._shape.format.policy(self._checkpoint(run, step), self._shape.ranks)

    def weights(self, run: RunSettings, step: int) -> dict[str, Tensor] | None:
        """``policy`` with its shards put together; None with LoRA, where the engine has a sum, or base and adapters."""
        parts: dict[str, list[Tensor]] = {}
        # in the order of ranks, each with a stretch of the first dimension
        for name, tensor in self.policy(run, step).items():
            parts.setdefault(name.rpartition(": ")[2], []).append(tensor)
        return None if any("lora" in name for name in parts) else {name: torch.cat(p) for name, p in parts.items()}

    def random_state(self, run: RunSettings, step: int) -> dict[str, str]:
        """sha256 of torch's random state on each rank; verl seeds no other stream."""
        return self._shape.format.random_state(self._checkpoint(run, step), self._shape.ranks)


def _row(index: int, text: str) -> dict[str, Any]:
    return {
        "data_source": "tiny",
        "prompt": [{"role": "user", "content": text}],
        "ability": "none",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"split": "train", "index": index},
    }


def _with_image(index: int, row: dict[str, Any]) -> dict[str, Any]:
    """The row with a small image of its own before its text."""
    picture = Image.new("RGB", (16, 16), (37 * index % 256, 91 * index % 256, 13 * index % 256))
    file = io.BytesIO()
    picture.save(file, "PNG")
    (prompt,) = row["prompt"]
    # in the words of qwen_vl_utils, which would make it larger
    image = {"bytes": file.getvalue(), "min_pixels": 64, "max_pixels": 256}
    return {**row, "prompt": [{**prompt, "content": f"<image>{prompt['content']}"}], "images": [image]}


def _word(value: Any) -> str:
    """A value in Hydra's grammar; JSON is inside of it for lists, with its quotes."""
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    return "null" if value is None else str(value)
