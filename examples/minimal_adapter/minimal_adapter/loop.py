"""A small RL trainer: REINFORCE with a group baseline, rollouts by vLLM's AsyncLLM. It knows nothing of speculation.

The methods of ``Trainer`` are the places where ``adapter.MinimalAdapter``, a subclass, adds something; a run without the flag
never imports that module.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from minimal_adapter import cpu

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    target: Path  # Hugging Face folder of the policy at version 0
    out: Path
    steps: int
    spec: Mapping[str, Any] = field(default_factory=dict)  # what followed --spec.<name> on the command line
    replay: Path | None = None  # record rollouts there, or train on those that it holds
    save_every: int = 0
    resume: Path | None = None  # ``out`` of a former run
    lr: float = 3e-4
    prompts: int = 4  # per step
    group: int = 4  # samples of each prompt
    max_tokens: int = 24
    temperature: float = 1.0
    dtype: str = "float32"  # of the engine
    max_num_seqs: int = 16
    max_model_len: int = 256
    engines: int = 1
    seed: int = 0


class Completion(NamedTuple):
    """What the engine says to one request."""

    tokens: list[int]
    log_probs: list[float]  # of each token, while sampling
    version: int  # policy version that it had


@dataclass
class Rollouts:
    """Sampled sequences of one step, B of them."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: list[list[float]]  # of each response's tokens, by the engine while sampling
    versions: list[int]  # policy version that the engine sampled the first token of each with
    last_versions: list[int]  # and the last one


class Engine:
    """One AsyncLLM, or several, on an event loop of its own thread, so that the trainer's thread may wait for it."""

    def __init__(self, arguments: dict[str, Any], engines: int = 1) -> None:
        cpu.prepare_process()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.version = -1  # of the policy that the workers say they have
        self.llms: list[Any] = []
        for _ in range(engines):
            self.llms.append(self.run(self._start(arguments)))

    @property
    def llm(self) -> Any:
        return self.llms[0]

    async def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(**arguments).create_engine_config()
        cpu.prepare_start()
        return AsyncLLM.from_vllm_config(config)

    def submit(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine on the engine's loop; returns a ``concurrent.futures.Future``."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for its result; vLLM leaves calls to an engine that died unanswered."""
        future = self.submit(work)
        while not wait([future], timeout=5.0).done:
            if dead := [llm for llm in self.llms if llm.errored]:
                raise RuntimeError("a vLLM engine has died; its own error is above") from dead[0].dead_error
        result: T = future.result()
        return result

    async def load_policy(self, version: int, weights: dict[str, Tensor]) -> None:
        """Put new policy weights into the running engines; what they have cached is of the old ones."""
        data = save(weights)
        for llm in self.llms:
            answers = await llm.collective_rpc("load_policy", args=(version, data))
            await llm.reset_prefix_cache()
        self.version = answers[0]

    def close(self) -> None:
        for llm in self.llms:
            self.loop.call_soon_threadsafe(llm.shutdown, 1.0)  # seconds until it is killed
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)


class Trainer:
    """Policy, optimizer, engine, and the steps of the run."""

    def __init__(self, settings: Settings) -> None:
        """Load the policy; the engine starts in ``run``."""
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.policy: Any = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=settings.lr, weight_decay=0.0)
        self.step = 0
        self.sampling = {"temperature": settings.temperature, "top_p": 1.0, "top_k": -1}

    # ---- the engine

    def engine_arguments(self) -> dict[str, Any]:
        return {
            "model": str(self.settings.target),
            "skip_tokenizer_init": True,
            "dtype": self.settings.dtype,
            "max_model_len": self.settings.max_model_len,
            "max_num_seqs": self.settings.max_num_seqs,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "logprobs_mode": "processed_logprobs",
            "seed": self.settings.seed,
            "worker_extension_cls": "minimal_adapter.worker.PolicyWorker",
        }

    def start_engine(self) -> None:
        self.engine = Engine(self.engine_arguments(), self.settings.engines)

    def sync(self) -> None:
        weights = {name: tensor.contiguous() for name, tensor in self.policy.state_dict().items()}
        self.engine.run(self.engine.load_policy(self.policy_version(), weights))

    def policy_version(self) -> int:
        """Version of the policy's weights as they are now: one update per step."""
        return self.step

    # ---- one step

    def run(self) -> None:
        """All steps, or those that a resumed run has left."""
        if self.settings.resume is not None:
            self.load(last_checkpoint(self.settings.resume))
        self.start_engine()
        try:
            self.sync()
            while self.step < self.settings.steps:
                self.train_step()
        finally:
            self.engine.close()

    def train_step(self) -> None:
        """Rollout, log-probs, update, weight sync."""
        began = time.perf_counter()
        rollouts = self.replayed() or self.generate(self.sample_prompts())
        generated = time.perf_counter()
        rewards = torch.tensor([reward(response, self.policy.config.vocab_size) for response in rollouts.responses])
        with torch.no_grad():
            old = self.log_probs(rollouts)
        loss = self.update(rollouts, old, group_advantages(rewards, self.settings.group))
        self.step += 1
        metrics = {"step": self.step, "reward": float(rewards.mean()), "loss": loss, **self.metrics()}
        if self.settings.save_every and self.step % self.settings.save_every == 0:
            checkpoints = self.settings.out / "checkpoints"
            self.save(checkpoints / "unfinished")
            (checkpoints / "unfinished").rename(checkpoints / f"step_{self.step}")
        self.sync()
        metrics |= {"generate_s": generated - began, "step_s": time.perf_counter() - began}
        with (self.settings.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def sample_prompts(self) -> list[list[int]]:
        """This step's prompts, each ``group`` times; random tokens of random length."""
        rng = random.Random(f"{self.settings.seed}/{self.step}")
        vocabulary = range(2, self.policy.config.vocab_size)  # 0 ends a sequence, 1 pads
        chosen = [[rng.choice(vocabulary) for _ in range(rng.randint(4, 12))] for _ in range(self.settings.prompts)]
        return [prompt for prompt in chosen for _ in range(self.settings.group)]

    def generate(self, prompts: Sequence[list[int]]) -> Rollouts:
        """Sample one response for each prompt, all at once."""

        async def all_requests() -> list[Completion]:
            return await asyncio.gather(*(self.request(i, prompt) for i, prompt in enumerate(prompts)))

        responses, log_probs, versions = map(list, zip(*self.engine.run(all_requests()), strict=True))
        return self.recorded(Rollouts(list(prompts), responses, log_probs, versions, versions))

    def recorded(self, rollouts: Rollouts) -> Rollouts:
        """Kept for a run that is to train on the same, if that is asked for."""
        if self.settings.replay is not None:
            self.settings.replay.mkdir(parents=True, exist_ok=True)
            (self.settings.replay / f"step_{self.step}.json").write_text(json.dumps(asdict(rollouts)))
        return rollouts

    async def request(
        self, index: int, prompt: list[int], most: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> Completion:
        """One request.

        Args:
            index: of the request.
            prompt: token ids.
            most: tokens of the response; None: as many as the settings say.
            extra: vLLM's ``extra_args``.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            **self.sampling,
            max_tokens=self.settings.max_tokens if most is None else most,
            logprobs=0,
            detokenize=False,
            extra_args=None if extra is None else dict(extra),
        )
        version, llm = self.engine.version, self.engine.llms[index % len(self.engine.llms)]
        final: Any = None
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"{self.step}-{index}"):
            final = output
        tokens = list(final.outputs[0].token_ids)
        stated = [at[t].logprob for at, t in zip(final.outputs[0].logprobs, tokens, strict=True)]
        return Completion(tokens, stated, version)

    def replayed(self) -> Rollouts | None:
        """This step's recorded rollouts, if there are any."""
        path = None if self.settings.replay is None else self.settings.replay / f"step_{self.step}.json"
        return Rollouts(**json.loads(path.read_text())) if path is not None and path.exists() else None

    def log_probs(self, rollouts: Rollouts) -> Tensor:
        """The log-prob pass: [B, T] of the policy as it was when it sampled, zero behind the end of a response."""
        return self.policy_log_probs(rollouts)

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        """One optimizer step; returns the loss.

        Args:
            rollouts: B sequences.
            old: [B, T] log-probs from the log-prob pass.
            advantages: [B].
        """
        self.optimizer.zero_grad()
        loss = self.loss(rollouts, old, advantages)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def loss(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> Tensor:
        """REINFORCE in its importance-weighted form; arguments as for ``update``."""
        mask = padded(rollouts.responses)[1]
        ratio = (self.policy_log_probs(rollouts) - old).exp()
        return -(ratio * advantages[:, None] * mask).sum() / mask.sum()

    def policy_log_probs(self, rollouts: Rollouts) -> Tensor:
        """Teacher-forced log-probs of the responses, [B, T], by one forward pass over right-padded sequences."""
        sequences = [p + r for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
        ids = padded(sequences)[0].long()
        logits = self.policy(input_ids=ids, use_cache=False).logits[:, :-1]
        of_next = (logits / self.settings.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        lengths = zip(rollouts.prompts, rollouts.responses, strict=True)
        rows = [row[len(p) - 1 : len(p) - 1 + len(r)] for row, (p, r) in zip(of_next, lengths, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    # ---- what a run leaves behind

    def metrics(self) -> dict[str, float]:
        return {}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: t.contiguous() for n, t in self.policy.state_dict().items()}, folder / "policy.safetensors")
        state = {"step": self.step, "optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self.policy.load_state_dict(load_file(folder / "policy.safetensors"))
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])


def reward(response: Sequence[int], vocab_size: int) -> float:
    """Share of tokens in the lower half of the vocabulary."""
    return sum(token < vocab_size // 2 for token in response) / max(1, len(response))


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Reward less the mean of its group; [B] to [B]."""
    grouped = rewards.view(-1, group)
    return (grouped - grouped.mean(-1, keepdim=True)).flatten()


def padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """[B, T] right-padded with zeros, float32, and the mask of what is no padding."""
    values = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float32) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return values, torch.arange(values.shape[1]) < lengths[:, None]


def last_checkpoint(out: Path) -> Path:
    return max((out / "checkpoints").glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
