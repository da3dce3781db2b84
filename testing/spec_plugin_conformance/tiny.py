"""A tiny policy, its tokenizer and prompts for the kit's runs: made in seconds, without a network, the same every time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from draft_training.layers import initialise
from draft_training.mtp import MtpShape
from draft_training.mtp_module import MtpKind
from spec_plugin_conformance.targets import TinyTarget, tiny_targets

VOCAB, HIDDEN, STEP = 320, 64, 37
END, PAD = "<|im_end|>", "<|pad|>"  # verl asks any Qwen tokenizer for <|im_end|>
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT_TEMPLATE_OF_PARTS = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
REWARD = '''"""Share of different characters in the response; verl calls compute_score, OpenRLHF calls reward_func."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    # in 64ths: sums of them are exact, in whatever order and dtype a trainer adds up
    return round(64 * len(set(solution_str)) / max(1, len(solution_str))) / 64


def reward_func(queries, prompts, labels):
    score = compute_score("", queries[0].removeprefix(prompts[0]), labels[0])
    return {"rewards": score, "scores": score}
'''


def tiny_config(family: str = "qwen3", **changes: Any) -> PretrainedConfig:
    """A policy of 0.3M parameters that EAGLE-3 and vLLM on a CPU accept, with changes.

    Args:
        family: its ``model_type``; for those in ``spec_plugin_conformance.targets`` with the changes that they make.
        changes: to the settings here; of a model of parts, to those of its part for texts.
    """
    tiny_target = tiny_targets().get(family, TinyTarget(family, "", "engine"))
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 8,  # EAGLE-3 taps three different layers: fewer do not have them
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # vLLM's CPU attention needs 32 or more
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
    }
    settings |= {**tiny_target.changes, **changes}
    if not tiny_target.more:
        return AutoConfig.for_model(family, **settings)
    whole = {name: settings[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(family, text_config=settings, **whole, **tiny_target.more)


def make_target(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random policy that says, six times in seven, the current token + 37: sharp, and easy to draft for.

    Args:
        folder: what is there already stays.
        dtype: of the weights.
        changes: to ``tiny_config``, its family among them; vocabulary and hidden size stay.
    """
    if (folder / "config.json").exists():
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(**changes)
        kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
        model = kind.from_config(config, dtype=torch.float32)
        embed = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN), dim=-1)
    model.get_input_embeddings().weight.data = embed * 8
    model.get_output_embeddings().weight.data = embed.roll(STEP, 0).clone()  # row i + 37 points where token i does
    tiny_target = tiny_targets().get(config.model_type)
    for name, parameter in model.named_parameters():
        if tiny_target is not None and name.split(".")[-2] in tiny_target.quiet:
            parameter.data *= 0.1
    if tiny_target is not None and tiny_target.processor is not None:
        # what trainers forbid the engine to sample (verl does, and not the actor), the policy must hardly ever mean
        model.get_output_embeddings().weight.data[2 : 2 + len(tiny_target.tokens)] = 0
    model.to(dtype).save_pretrained(folder)
    if tiny_target is not None and tiny_target.processor is not None:
        make_processor(tiny_target).save_pretrained(folder)
    else:
        make_tokenizer(() if tiny_target is None else tiny_target.tokens).save_pretrained(folder)
    return folder


def make_processor(tiny_target: TinyTarget) -> Any:
    """A tokenizer with one token per byte and placeholders for images, and what turns these into patches.

    Raises:
        RuntimeError: if the classes of transformers that it is made of lack a package (torchvision).
    """
    assert tiny_target.processor is not None
    import transformers

    whole, images, videos = (getattr(transformers, name) for name in tiny_target.processor)
    tokenizer = byte_tokenizer(VOCAB, (END, PAD, *tiny_target.tokens))
    vision = tiny_target.more["vision_config"]
    sizes = {"patch_size": vision["patch_size"], "merge_size": 2, "temporal_patch_size": 2}
    least, most = (2 * vision["patch_size"]) ** 2, (4 * vision["patch_size"]) ** 2
    limits = {"size": {"shortest_edge": least, "longest_edge": most}}
    try:
        parts = {"image_processor": images(**sizes, **limits), "video_processor": videos(**sizes, **limits)}
    except ImportError as error:
        raise RuntimeError(f"the kit's {tiny_target.name} reads images: install torchvision ({error})") from error
    image, _, begin, end, *_ = tiny_target.tokens
    tokenizer.chat_template = CHAT_TEMPLATE_OF_PARTS.replace("IMAGE", f"{begin}{image}{end}")
    return whole(tokenizer=tokenizer, chat_template=tokenizer.chat_template, **parts)


def go_on(folder: Path) -> None:
    """Make a policy of ``make_target`` one that never ends a response, though its tokenizer has a token for the end.

    One number of each embedding is the same, so that the final norm's output has it, too; the end's row of the head turns away
    from it. What was followed by the end is followed by the token behind it.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embed, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if bool((embed[:, -1] == 2.0).all()):
        return
    embed[:, -1], head[:, -1] = 2.0, 0.0
    head[STEP] += head[0]
    head[0] = 0.0
    head[0, -1] = -20.0
    save_file(tensors, file, {"format": "pt"})


def add_mtp_layer(folder: Path, seed: int = 0) -> None:
    """Make a saved Qwen2 a MiMo: the same model, and beside it a layer for multi-token prediction, initialised at random.

    transformers goes on to read it as a Qwen2, and leaves the layer out, as trainers do with the released ones.
    """
    hf = json.loads((folder / "config.json").read_text())
    if "num_nextn_predict_layers" in hf:
        return
    hf |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    layer = MtpKind(MtpShape.from_target(hf)).build("cpu", torch.float32)
    initialise(layer, torch.Generator().manual_seed(seed))
    own = {f"model.mtp_layers.0.{name}": p.detach() for name, p in layer.named_parameters()}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2))


def make_tokenizer(special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, and special ones beside the two that each has."""
    tokenizer = byte_tokenizer(VOCAB, (END, PAD, *special))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_tokenizer(vocab_size: int, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte.

    Args:
        vocab_size: filled up with unused tokens.
        special: token 0, the end of a text; token 1, padding; and more.
    """
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<unused{i}>" for i in range(len(tokens), vocab_size)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    end, pad, *more = special
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=pad, additional_special_tokens=more)


def prompts(count: int) -> Sequence[str]:
    """``count`` short texts, all different."""
    return [f"prompt {i} {i * i % 97}" for i in range(count)]


def write_reward(folder: Path) -> Path:
    """A file with a reward that varies between the samples of a prompt."""
    file = folder / "reward.py"
    file.write_text(REWARD)
    return file


def write_jsonl(file: Path, count: int) -> Path:
    """Write ``count`` prompts as OpenRLHF reads them: JSON lines with a chat ``prompt`` and a ``label``."""
    rows = [{"prompt": [{"role": "user", "content": text}], "label": ""} for text in prompts(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
