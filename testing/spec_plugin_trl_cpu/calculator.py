"""A tool, and a policy that calls it as Qwen3 would: TRL's tool loop with calls that it really parses and answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from spec_plugin_conformance import tiny
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b


#: the last token of what a turn begins with
_ASKED = "assistant\n"
#: of a call: its beginning, what stands between the two numbers, and its end, which holds the second
_CALL, _BETWEEN = '<tool_call>\n{"name": "add", "arguments": {"a": ', ', "b": '
_ENDS = tuple(f"{digit}}}}}\n</tool_call>" for digit in range(10))
_ANSWER = ("The ", "sum ", "is ", "above", "!!")
#: around what the tool says, in Qwen3's template
_TOLD = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response>")
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


def make_target(folder: Path) -> Path:
    """A policy that in every second turn calls ``add``, with digits of its choice, and else says a sentence.

    Args:
        folder: what is there already stays.

    Raises:
        FileNotFoundError: if TRL is not installed, whose copy of Qwen3's template the tokenizer gets.
    """
    if (folder / "config.json").exists():
        return folder
    tokenizer = _tokenizer()
    model = AutoModelForCausalLM.from_pretrained(tiny.make_target(folder.with_name("chain")))
    embed, head = (layer.weight.data for layer in (model.get_input_embeddings(), model.get_output_embeddings()))
    number = tokenizer.convert_tokens_to_ids
    for word in _FOLLOWS:  # what the chain would have said
        head[(number(word) + tiny.STEP) % tiny.VOCAB] = 0.0
    for word, behind in _FOLLOWS.items():
        direction = torch.nn.functional.normalize(embed[number(word)], dim=-1)
        for one in behind:
            head[number(one)] += _SURER * direction
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for each piece of a conversation, the tool's description among them."""
    pieces = ["<|im_start|>", _ASKED, _CALL, _BETWEEN, *_ENDS, *_ANSWER, *_TOLD]
    tokenizer = tiny.byte_tokenizer(tiny.VOCAB - len(pieces) - 1, (tiny.END, tiny.PAD))
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise FileNotFoundError("TRL is not installed here: its copy of Qwen3's chat template is needed")
    tokenizer.chat_template = (Path(found.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
    user = [{"role": "user", "content": ""}]
    described = str(tokenizer.apply_chat_template(user, tools=[add], tokenize=False)).partition("<|im_start|>user")[0]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (*pieces, described)])
    assert len(tokenizer) == tiny.VOCAB
    return tokenizer
