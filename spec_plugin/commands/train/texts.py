"""What a draft is trained on before a run: prompts to sample from, or rollouts that somebody has kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_plugin.errors import SpecConfigError

logger = logging.getLogger(__name__)

#: where a prompt may be in a row, and a response: plain names first, then those of verl's rollout dumps
_PROMPT, _RESPONSE = ("prompt", "input", "messages", "question"), ("response", "output", "completion")
_EXPECTED = "expected a text, chat messages or token ids"


@dataclass(frozen=True)
class Rollout:
    """Token ids of a prompt, and of what was sampled after it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def read_prompts(file: Path, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts in a file.

    Args:
        file: .json (a list), .jsonl or .parquet. An entry is a text, which is taken as it is, a list of chat messages, which
            gets the tokenizer's chat template, or a row with one of the two as ``prompt`` (verl's and OpenRLHF's data sets).
        tokenizer: the policy's.

    Raises:
        SpecConfigError: naming the file, the entry and what was expected.
    """
    prompts = [_prompt_ids(entry, tokenizer, f"{file}, entry {i + 1}") for i, entry in enumerate(_entries(file))]
    if not prompts:
        raise SpecConfigError(f"{file} holds no prompts")
    return prompts


def read_rollouts(files: Sequence[Path], tokenizer: Any) -> list[Rollout]:
    """Rollouts from files, or from folders of .jsonl files, such as verl's ``trainer.rollout_data_dir``.

    An entry is a row with ``prompt`` and ``response`` (or verl's ``input`` and ``output``), each a text or token ids. Texts are
    tokenized again; verl leaves special tokens out when it dumps them, so that the policy sees slightly other prompts than
    in the run, and the end token is added here.

    Raises:
        SpecConfigError: naming the file, the entry and what was expected.
    """
    found = []
    for file in (f for path in files for f in _files(path)):
        for i, entry in enumerate(_entries(file)):
            where = f"{file}, entry {i + 1}"
            response = _first(entry, _RESPONSE)
            if response is None:
                raise SpecConfigError(f"{where}: no response; expected one of {', '.join(_RESPONSE)} in each row")
            ids = _ids(response, tokenizer, where)
            if isinstance(response, str) and tokenizer.eos_token_id is not None:
                ids.append(int(tokenizer.eos_token_id))
            if ids:
                found.append(Rollout(tuple(_prompt_ids(entry, tokenizer, where)), tuple(ids)))
    if not found:
        raise SpecConfigError(f"no rollouts in {', '.join(map(str, files))}")
    return found


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise SpecConfigError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise SpecConfigError(f"no .jsonl file in {path}")
    return files


def _entries(file: Path) -> Iterator[Any]:
    try:
        if file.suffix == ".parquet":
            import pandas

            yield from pandas.read_parquet(file).to_dict("records")
        elif file.suffix == ".jsonl":
            with file.open() as lines:
                yield from (json.loads(line) for line in lines if line.strip())
        else:
            content = json.loads(file.read_text())
            if not isinstance(content, list):
                raise SpecConfigError(f"{file}: expected a list, found {type(content).__name__}")
            yield from content
    except ImportError as error:
        raise SpecConfigError(f"{file}: reading parquet needs pandas and pyarrow ({error}); or give .jsonl") from error
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"{file} cannot be read: {error}; expected .json (a list), .jsonl or .parquet") from error


def _first(entry: Any, names: Sequence[str]) -> Any:
    if not isinstance(entry, Mapping):
        return None
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def _prompt_ids(entry: Any, tokenizer: Any, where: str) -> list[int]:
    value = _first(entry, _PROMPT) if isinstance(entry, Mapping) else entry
    if value is None:
        raise SpecConfigError(f"{where}: no prompt; expected a text, chat messages, or a row with {', '.join(_PROMPT)}")
    ids = _ids(value, tokenizer, where)
    if not ids:
        raise SpecConfigError(f"{where}: the prompt is empty")
    return ids


def _ids(value: Any, tokenizer: Any, where: str) -> list[int]:
    if isinstance(value, str):
        return list(tokenizer(value, add_special_tokens=False).input_ids)
    try:
        rows = list(value)
    except TypeError:
        raise SpecConfigError(f"{where}: {_EXPECTED}, found {value!r:.80}") from None
    if rows and all(isinstance(row, Mapping) for row in rows):
        try:
            text = tokenizer.apply_chat_template(
                [dict(row) for row in rows], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates raise what they like
            raise SpecConfigError(f"{where}: the tokenizer's chat template refused it: {error}") from error
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    try:
        return [int(token) for token in rows]
    except (TypeError, ValueError):
        raise SpecConfigError(f"{where}: {_EXPECTED}, found {value!r:.80}") from None
