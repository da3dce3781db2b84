"""The small policy of the quickstart: a task whose answers can be checked, and a student taught by careless examples.

A policy this small would cost an engine hardly anything but its own overhead, and nothing could be saved by calling it less
often. So layers are added once it is taught, which change nothing at first and cost as much as the others: a draft of one
layer is then as cheap beside it as beside a large policy.

The task is addition, written out column by column. The teaching examples contain slips, so that the student gets about
half of its samples right: reinforcement learning then has something to do.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from spec_plugin_conformance.tiny import END, PAD, add_mtp_layer, byte_tokenizer, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draft_training.folders import claimed, sweep
from draft_training.optimizer import Muon

SPECIAL_TOKENS = (END, PAD, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100  # label of tokens without a loss


@dataclass(frozen=True)
class PolicySettings:
    """Everything that decides what the trained policy is; its digest names the cached result."""

    steps: int = 320  # optimizer steps of the teaching phase
    batch_size: int = 16  # examples per step
    lr: float = 3e-3  # peak learning rate of embedding, head and norms
    matrix_lr: float = 1e-2  # peak learning rate of the matrices (Muon)
    slip: float = 0.15  # chance that a column is wrong in the careless examples
    careful_share: float = 0.7  # share of the steps before the examples turn careless
    digits: tuple[int, ...] = (3, 4, 5)  # how many digits both numbers may have
    hidden_size: int = 128
    layers: int = 8  # EAGLE-3 taps three different layers: fewer than 8 do not have them
    silent_layers: int = 0  # added between those once they are taught; see ``deepen``
    vocab_size: int = 320
    family: str = "qwen3"  # or "mimo": a Qwen2 with a layer for multi-token prediction, which knows nothing yet
    seed: int = 0

    @property
    def digest(self) -> str:
        """Digest of the settings and of this file, for the name of a cache folder."""
        text = json.dumps(asdict(self), sort_keys=True) + Path(__file__).read_text()
        return hashlib.sha256(text.encode()).hexdigest()[:12]


#: the quickstart's own
QUICKSTART = PolicySettings(silent_layers=24)


# ---------------------------------------------------------------------------------------------------- the task


def problem(rng: random.Random, digits: int) -> tuple[int, int]:
    """Two numbers of that many digits."""
    low, high = 10 ** (digits - 1), 10**digits
    return rng.randrange(low, high), rng.randrange(low, high)


def question(a: int, b: int) -> list[dict[str, str]]:
    """The chat that asks for a + b."""
    return [{"role": "user", "content": f"{a}+{b}="}]


def worked_answer(a: int, b: int, rng: random.Random | None = None, slip: float = 0.0) -> str:
    """The sum column by column, last digit first, then ``#`` and the result.

    Args:
        a: first number.
        b: second number, with as many digits.
        rng: random stream of the slips.
        slip: chance that a column is one off; the columns after it go on from the mistake, as a pupil would.
    """
    lines, written, carry = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        if rng is not None and rng.random() < slip:
            total += 1 if total == 0 or rng.random() < 0.5 else -1
        lines.append(f"{x}+{y}+{carry}={total:02}\n")
        written, carry = f"{total % 10}{written}", total // 10
    return "".join(lines) + f"#{carry or ''}{written}"


# ---------------------------------------------------------------------------------------------------- the student


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and a chat template."""
    tokenizer = byte_tokenizer(vocab_size, SPECIAL_TOKENS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(settings: PolicySettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """An untrained policy of that size, in float32. vLLM's CPU attention needs heads of 32 or more."""
    config = tiny_config(
        "qwen2" if settings.family == "mimo" else settings.family,
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=max(1, settings.hidden_size // 64),
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(settings.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def deepen(model: PreTrainedModel, silent: int) -> PreTrainedModel:
    """A model with so many more layers, spread between the given one's, that computes the same.

    The new layers' output projections are zero: they add nothing to the residual stream until training changes that.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = config.max_window_layers = model.config.num_hidden_layers + silent
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    deep = type(model)(config)
    places = [i * config.num_hidden_layers // model.config.num_hidden_layers for i in range(len(model.model.layers))]
    with torch.no_grad():
        for layer in deep.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for place, layer in zip(places, model.model.layers, strict=True):
        deep.model.layers[place].load_state_dict(layer.state_dict())
    for part in ("embed_tokens", "norm"):
        getattr(deep.model, part).load_state_dict(getattr(model.model, part).state_dict())
    deep.lm_head.load_state_dict(model.lm_head.state_dict())
    return deep


def teaching_batches(
    settings: PolicySettings, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (input ids [B, L], labels [B, L]); a batch has one number of digits, so padding is rare."""
    rng = random.Random(settings.seed)
    for step in range(settings.steps):
        slip = settings.slip if step >= settings.careful_share * settings.steps else 0.0
        digits = rng.choice(settings.digits)
        ids, labels = [], []
        for _ in range(settings.batch_size):
            a, b = problem(rng, digits)
            prompt = tokenizer.apply_chat_template(question(a, b), add_generation_prompt=True, tokenize=False)
            asked = tokenizer(prompt).input_ids
            answer = [*tokenizer(worked_answer(a, b, rng, slip)).input_ids, tokenizer.eos_token_id]
            ids.append(torch.tensor(asked + answer))
            labels.append(torch.tensor([IGNORED] * len(asked) + answer))
        yield (
            torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        )


def build_optimizers(model: PreTrainedModel, settings: PolicySettings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which learns this task in a fifth of AdamW's steps, and AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, settings.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=settings.lr, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over 20 steps, then linear decay to a twentieth."""
    return min(1.0, (step + 1) / 20) * (1 - 0.95 * step / steps)


def taught(
    model: PreTrainedModel,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    settings: PolicySettings,
    show: bool = True,
) -> float:
    """Train on batches of (input ids [B, L], labels [B, L]), deterministically; returns the last loss in nats per token."""
    optimizers = build_optimizers(model, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: lr_factor(step, settings.steps)) for o in optimizers]
    loss = torch.tensor(float("nan"))
    columns = (TextColumn("teaching the policy"), BarColumn(), TextColumn("loss {task.fields[loss]}"))
    with one_thread(), Progress(*columns, TimeRemainingColumn(), disable=not show) as progress:
        task = progress.add_task("teach", total=settings.steps, loss="–")
        for ids, labels in batches:
            loss = model(input_ids=ids, labels=labels).loss
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            progress.update(task, advance=1, loss=f"{loss.item():.3f}")
    return loss.item()


@contextmanager
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from a second thread, and loses much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_policy(out: Path, settings: PolicySettings = PolicySettings(), show: bool = True) -> Path:
    """Teach a policy and save model and tokenizer in ``out``, which appears only when complete.

    Args:
        out: folder to create; an existing one is taken as it is.
        settings: what to build.
        show: draw a progress bar.

    Returns:
        ``out``, as an absolute path.
    """
    out = out.absolute()
    if out.exists():
        return out
    tokenizer = build_tokenizer(settings.vocab_size)
    model = build_model(settings, tokenizer)
    loss = taught(model, teaching_batches(settings, tokenizer), settings, show)
    if settings.silent_layers:
        model = deepen(model, settings.silent_layers)
    with made_whole(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if settings.family == "mimo":
            add_mtp_layer(partial, settings.seed)
        (partial / "settings.json").write_text(json.dumps({**asdict(settings), "last_loss": loss}, indent=2))
    return out


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which then becomes ``out``: an interrupted one is never taken for complete.

    Where another process was faster, ``out`` stays as that made it.
    """
    sweep(out.parent, f"{out.name}.*.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".partial", dir=out.parent))
    partial.chmod(0o755)
    try:
        with claimed(partial):
            yield partial
            try:
                partial.rename(out)
            except OSError:
                if not out.exists():
                    raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cached_policy(cache: Path, settings: PolicySettings = PolicySettings(), show: bool = True) -> Path:
    """The policy of these settings, built on the first call."""
    return build_policy(policy_folder(cache, settings), settings, show)


def policy_folder(cache: Path, settings: PolicySettings) -> Path:
    """Where ``cached_policy`` keeps it: one folder per digest."""
    return cache / f"policy-{settings.digest}"
