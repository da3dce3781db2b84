"""A tool, and a policy that calls it as Qwen3 would: for trainers that parse such calls, and answer them, themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from spec_plugin_conformance import tiny


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


#: a conversation in Qwen's words, without a description of the tools; trainers may bring a template of their own
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response>{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CALLED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
#: the last token of what a turn begins with
_ASKED = "assistant\n"
#: of a call: its beginning, what stands between the two numbers, and its end, which holds the second
_CALL, _BETWEEN = '<tool_call>\n{"name": "add", "arguments": {"a": ', ', "b": '
_ENDS = tuple(f"{digit}}}}}\n</tool_call>" for digit in range(10))
_ANSWER = ("The ", "sum ", "is ", "above", "!!")
#: around what the tool says, in Qwen3's template
_TOLD = ("<|im_start|>user\n<tool_response>\n", "\n</tool_response>")
_DIGITS = tuple(map(str, range(10)))
#: what follows what, each as likely as the others
_FOLLOWS = {
    _ASKED: (_CALL, _ANSWER[0]),
    _CALL: _DIGITS,
    **{digit: (_BETWEEN,) for digit in _DIGITS},
    _BETWEEN: _ENDS,
    **{end: (tiny.END,) for end in _ENDS},
    **{word: (behind,) for word, behind in zip(_ANSWER, (*_ANSWER[1:], tiny.END), strict=True)},
}
#: how much surer of its next token than the kit's other policies, so that most of its calls can be parsed
_SURER = 1.25


def answer(said: str) -> str | None:
    """What the environment says to a turn of the policy's: the sum that it asked for; None if it asked for none.

    For trainers that leave the parsing to an environment of the user's.
    """
    found = _CALLED.search(said)
    if found is None:
        return None
    try:
        result = str(add(**json.loads(found[1])["arguments"]))
    except (ValueError, KeyError, TypeError) as error:
        result = f"error: {error}"
    begin, end = _TOLD
    return f"\n{begin}{result}{end}{tiny.END}\n<|im_start|>{_ASKED}"


def make_target(folder: Path, dtype: torch.dtype = torch.float32, template: str = TEMPLATE) -> Path:
    """A policy that in every second turn calls ``add``, with digits of its choice, and else says a sentence.

    Args:
        folder: what is there already stays.
        dtype: of the weights.
        template: of its conversations, which says what a tool has answered as Qwen3's does.
    """
    if (folder / "config.json").exists():
        return folder
    tokenizer = _tokenizer(template)
    model = AutoModelForCausalLM.from_pretrained(tiny.make_target(folder.with_name("chain")))
    embed, head = (layer.weight.data for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
    number = tokenizer.convert_tokens_to_ids
    for word in _FOLLOWS:  # what the chain would have said
        head[(number(word) + tiny.STEP) % tiny.VOCAB] = 0.0
    for word, behind in _FOLLOWS.items():
        direction = torch.nn.functional.normalize(embed[number(word)], dim=-1)
        for one in behind:
            head[number(one)] += _SURER * direction
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each piece of a conversation, the tool's description among them."""
    pieces = ["<|im_start|>", _ASKED, _CALL, _BETWEEN, *_ENDS, *_ANSWER, *_TOLD]
    tokenizer = tiny.byte_tokenizer(tiny.VOCAB - len(pieces) - 1, (tiny.END, tiny.PAD))
    tokenizer.chat_template = template
    user = [{"role": "user", "content": ""}]
    described = str(tokenizer.apply_chat_template(user, tools=[add], tokenize=False)).partition("<|im_start|>user")[0]
    pieces.append(described or "<unused>")
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    assert len(tokenizer) == tiny.VOCAB
    return tokenizer
