"""What the engine benchmarks run on: a policy, its padded twin, its prompts, and a draft trained on its own rollouts."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draft_training import (
    Document,
    DraftConfig,
    DraftTrainer,
    HiddenBuffer,
    TrainSettings,
    save_draft,
)
from examples.bench.common import CACHE, say, track
from examples.quickstart.policy import PolicySettings, cached_policy, made_whole, one_thread, problem, question
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.policy.online_training import documents_of
from spec_plugin.trainer.decoder import find_decoder
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

#: the quickstart's policy without slips in its teaching examples: a policy that knows its task, as late in a run
CAREFUL = PolicySettings(slip=0.0)
DIGITS = 5  # of the numbers to add: answers of 51 to 53 tokens, so that 48 are never cut short by the end of the answer
BATCH = 64  # sequences of one forward pass while sampling and harvesting

Prompts = list[list[int]]


@dataclass(frozen=True)
class DraftSettings:
    """Everything that decides what the trained draft is."""

    rollouts: int = 500
    tokens: int = 64  # most sampled tokens per rollout
    temperature: float = 1.0
    steps: int = 300  # optimizer steps
    k: int = 8  # most unrolled steps
    tokens_per_step: int = 1024
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class TrainedDraft:
    """A draft in a folder that vLLM serves, and what training measured on rollouts that it was not trained on."""

    path: Path
    expected_acceptance: float
    parameters: int


def default_target() -> Path:
    """The careful quickstart policy, taught on the first call (a minute or two), then from the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return cached_policy(CACHE, CAREFUL)


def addition_prompts(target: Path, count: int, seed: int) -> Prompts:
    """Prompts of the default target."""
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(target)
    chats = [question(*problem(rng, DIGITS)) for _ in range(count)]
    texts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
    return [tokenizer(text).input_ids for text in texts]


def prompts_of(target: Path, file: Path | None, count: int, seed: int) -> Prompts:
    """``count`` prompts: of a JSON file with a list of texts, drawn with repetition, or the default target's.

    Args:
        target: folder with the tokenizer.
        file: the user's prompts; None for the default target.
        count: how many.
        seed: other seeds give other prompts.
    """
    if file is None:
        return addition_prompts(target, count, seed)
    texts = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer(text).input_ids for text in random.Random(seed).choices(texts, k=count)]


# -------------------------------------------------------------------------------------------------- padding


def pad_state(state: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """A state dict whose MLPs have ``width`` units; the new ones do not reach the residual stream.

    Gate and up projections get copies of existing rows, so that the arithmetic is not on zeros; the down projection's
    new columns are zero, so that every output stays what it was.
    """
    padded = {}
    for name, tensor in state.items():
        if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            repeats = math.ceil(width / tensor.shape[0])
            tensor = tensor.repeat(repeats, 1)[:width].contiguous()
        elif name.endswith("mlp.down_proj.weight"):
            new = tensor.new_zeros(tensor.shape[0], width)
            new[:, : tensor.shape[1]] = tensor
            tensor = new
        padded[name] = tensor
    return padded


def padded_target(target: Path, width: int, dtype: str) -> Path:
    """The target with MLPs of ``width`` units, from the cache where it is; 0 pads nothing, but converts the dtype."""
    out = CACHE / f"padded-{digest_of(target, {'width': width, 'dtype': dtype, 'how': 1})}"
    if out.exists():
        return out
    say(f"padding the target's MLPs to {width or 'their own'} units")
    config = AutoConfig.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
    state = model.state_dict()
    if width:
        state = pad_state(state, width)
        config.intermediate_size = width
    config.dtype = dtype
    twin = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    twin.load_state_dict(state)
    with made_whole(out) as partial:
        twin.save_pretrained(partial)
        AutoTokenizer.from_pretrained(target).save_pretrained(partial)
    return out


# -------------------------------------------------------------------------------------------------- the draft


def trained_draft(
    target: Path,
    prompts: Callable[[int], Prompts],
    settings: DraftSettings,
    device: str,
    method: Method | None = None,
) -> TrainedDraft:
    """A draft for the target, trained by this project's own loop; from the cache where it is.

    Args:
        target: folder of the (unpadded) target.
        prompts: count -> prompts to roll out.
        settings: how to roll out and train.
        device: where.
        method: whose draft; none: EAGLE-3's.
    """
    name = {} if method is None else {"method": method.name}
    out = CACHE / f"draft-{digest_of(target, {**asdict(settings), **name})}"
    if not out.exists():
        _train(out, target, prompts(settings.rollouts), settings, device, method)
    about = json.loads((out / "bench.json").read_text())
    return TrainedDraft(out, about["expected_acceptance"], about["parameters"])


def newborn_draft(target: Path, dtype: str, width: int | None = None) -> Path:
    """An untrained draft for the target, as a run without a checkpoint starts from."""
    out = CACHE / f"newborn-{digest_of(target, {'dtype': dtype, 'width': width})}"
    if not out.exists():
        hf = json.loads((target / "config.json").read_text())
        config = DraftConfig.from_target(hf)
        config = replace(config, intermediate_size=width or config.intermediate_size)
        trainer = DraftTrainer(config, TrainSettings(), device="cpu", seed=0)
        save_draft(out, config, trainer.engine_tensors(getattr(torch, dtype)))
    return out


def _train(
    out: Path, target: Path, prompts: Prompts, settings: DraftSettings, device: str, method: Method | None
) -> None:
    with one_thread():
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, settings.dtype)).to(device).eval()
        torch.manual_seed(settings.seed)
        eagle = DraftConfig.from_target(json.loads((target / "config.json").read_text()))
        start = (method.draft if method else None) or StartingDraft(eagle)
        config = start.config
        rows = sample(model, prompts, settings)
        documents = harvest(model, rows, eagle.aux_layers if method is None else method.harvest or ())
        held_out, training = documents[: len(documents) // 10], documents[len(documents) // 10 :]
        trainer = DraftTrainer(
            config,
            TrainSettings(
                ttt_steps=min(settings.k, start.most_unrolled or settings.k), tokens_per_step=settings.tokens_per_step
            ),
            device=device,
            seed=settings.seed,
            tensors=start.tensors,
        )
        trainer.update_policy(model.get_input_embeddings().weight, model.get_output_embeddings().weight, 0)
        buffer = HiddenBuffer(1 << 30, 1 << 40, settings.seed)
        for document in training:
            buffer.add(document)
        untrained = trainer.evaluate(held_out).acceptance_length
        for _ in track(range(settings.steps), "training the draft"):
            trainer.train_slice(buffer, math.inf, 1)
        expected = trainer.evaluate(held_out).acceptance_length
    say(f"acceptance length expected on held-out rollouts: {untrained:.2f} untrained, {expected:.2f} trained")
    tensors = trainer.engine_tensors(getattr(torch, settings.dtype))
    with made_whole(out) as partial:
        trainer.kind.write(partial, tensors)
        about = {"expected_acceptance": expected, "parameters": sum(t.numel() for t in tensors.values())}
        (partial / "bench.json").write_text(json.dumps({**about, "settings": asdict(settings)}))


@torch.no_grad()
def sample(model: Any, prompts: Prompts, settings: DraftSettings) -> list[tuple[list[int], list[int]]]:
    """Roll out with transformers: (prompt, response) of every prompt, at plain temperature sampling."""
    rows = []
    end, pad = model.generation_config.eos_token_id, model.config.pad_token_id or 0
    ends = set(end if isinstance(end, list) else [end])
    for begin in track(range(0, len(prompts), BATCH), f"sampling {len(prompts)} rollouts, {BATCH} at a time"):
        part = prompts[begin : begin + BATCH]
        longest = max(map(len, part))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in part], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=model.device)
        options = dict(do_sample=True, temperature=settings.temperature, top_k=0, top_p=1.0)
        made = model.generate(ids, attention_mask=mask, max_new_tokens=settings.tokens, pad_token_id=pad, **options)
        for prompt, row in zip(part, made[:, longest:].tolist(), strict=True):
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            rows.append((prompt, row[:stop]))
    return rows


@torch.no_grad()
def harvest(model: Any, rows: Sequence[tuple[list[int], list[int]]], aux_layers: Sequence[int]) -> list[Document]:
    """What the trainer's log-prob pass leaves: one document per rollout, in order."""
    taps, documents = Taps.of(find_decoder(model), aux_layers), []
    for begin in track(range(0, len(rows), BATCH), "harvesting hidden states"):
        part = rows[begin : begin + BATCH]
        ids = [torch.tensor(p + r) for p, r in part]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(model.device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(model.device)
        with taps.attached():
            model.model(input_ids=padded, attention_mask=mask, use_cache=False)
        masks = responses_at_the_end(ids, [len(r) for _, r in part])
        hidden = harvested(taps, (ids, masks), HarvestPlan(1 << 30))
        assert hidden is not None
        documents += documents_of(hidden)
    return documents


def parameters_of(folder: Path) -> int:
    """Number of parameters of a safetensors checkpoint."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def digest_of(target: Path, settings: Mapping[str, Any]) -> str:
    """Names a cache folder by what is in it: the target's files and the settings."""
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(target.glob("*.safetensors"))]
    text = json.dumps([str(target.absolute()), stats, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
