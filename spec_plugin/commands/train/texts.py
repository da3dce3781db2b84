"""What a draft is trained on before a run: prompts to sample from, or rollouts that were saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.plan.text_files import check_regular, lines_of, text_of

logger = logging.getLogger(__name__)

#: where a prompt may be in a row, and a response: plain names first, then those of verl's rollout dumps
_PROMPT, _RESPONSE = ("prompt", "input", "messages", "question"), ("response", "output", "completion")
_EXPECTED = "expected a text, chat messages or token ids"


@dataclass(frozen=True)
class TokenizedRollout:
    """Token ids of a prompt, and of what was sampled after it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


def read_prompts(file: Path, tokenizer: Any, vocabulary: int | None = None) -> list[list[int]]:
    """Token ids of the prompts in a file.

    Args:
        file: .json (a list), .jsonl or .parquet. An entry is a text, which is taken as it is, a list of chat messages, which
            gets the tokenizer's chat template, or a row with one of the two as ``prompt`` (verl's and OpenRLHF's data sets).
        tokenizer: the policy's.
        vocabulary: how many tokens the policy knows; None: as many as there are.

    Raises:
        SpecConfigError: naming the file, the entry and what was expected.
    """
    reader = _Reader(tokenizer, vocabulary)
    prompts = [reader.prompt(entry, f"{file}, {unit} {i}") for unit, i, entry in _entries(file)]
    if not prompts:
        raise SpecConfigError(f"{file} holds no prompts")
    return prompts


def read_rollouts(files: Sequence[Path], tokenizer: Any, vocabulary: int | None = None) -> list[TokenizedRollout]:
    """Rollouts from files, or from folders of .jsonl files, such as verl's ``trainer.rollout_data_dir``.

    An entry is a row with ``prompt`` and ``response`` (or verl's ``input`` and ``output``), each a text or token ids. Texts are
    tokenized again; verl leaves special tokens out when it dumps them, so that the policy sees slightly other prompts than
    in the run, and the end token is added here. ``vocabulary`` is how many tokens the policy knows; None: as many as there are.

    Raises:
        SpecConfigError: naming the file, the entry and what was expected.
    """
    found, reader = [], _Reader(tokenizer, vocabulary)
    for file in (f for path in files for f in _files(path)):
        for unit, i, entry in _entries(file):
            where = f"{file}, {unit} {i}"
            response = _first(entry, _RESPONSE)
            if response is None:
                raise SpecConfigError(f"{where}: no response; expected one of {', '.join(_RESPONSE)} in each row")
            ids = reader.ids(response, where)
            if isinstance(response, str) and tokenizer.eos_token_id is not None:
                ids.append(int(tokenizer.eos_token_id))
            if ids:
                found.append(TokenizedRollout(tuple(reader.prompt(entry, where)), tuple(ids)))
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


def _entries(file: Path) -> Iterator[tuple[str, int, Any]]:
    """What there is, and where: the line of .jsonl, else the entry, counted from 1."""
    try:
        if file.suffix == ".parquet":
            import pandas

            check_regular(file)
            yield from (("entry", i, row) for i, row in enumerate(pandas.read_parquet(file).to_dict("records"), 1))
        elif file.suffix == ".jsonl":
            for number, line in enumerate(lines_of(file), 1):
                if line.strip():
                    yield "line", number, json.loads(line)
        else:
            content = json.loads(text_of(file))
            if not isinstance(content, list):
                raise SpecConfigError(f"{file}: expected a list, found {type(content).__name__}")
            yield from (("entry", i, entry) for i, entry in enumerate(content, 1))
    except ImportError as error:
        raise SpecConfigError(f"{file}: reading parquet needs pandas and pyarrow ({error}); or give .jsonl") from error
    except RecursionError as error:
        raise SpecConfigError(
            f"{file} cannot be read: it is nested too deeply; expected texts in a list or lines"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        raise SpecConfigError(f"{file} cannot be read: {error}; expected .json (a list), .jsonl or .parquet") from error


def _first(entry: Any, names: Sequence[str]) -> Any:
    if not isinstance(entry, Mapping):
        return None
    return next((entry[name] for name in names if entry.get(name) is not None), None)


@dataclass(frozen=True)
class _Reader:
    """Turns texts, chat messages and token ids into checked token ids."""

    tokenizer: Any
    vocabulary: int | None

    def prompt(self, entry: Any, where: str) -> list[int]:
        """Token ids of a row's prompt, or of a prompt that stands for itself."""
        value = _first(entry, _PROMPT) if isinstance(entry, Mapping) else entry
        if value is None:
            raise SpecConfigError(
                f"{where}: no prompt; expected a text, chat messages, or a row with {', '.join(_PROMPT)}"
            )
        ids = self.ids(value, where)
        if not ids:
            raise SpecConfigError(f"{where}: the prompt is empty; remove the entry")
        return ids

    def ids(self, value: Any, where: str) -> list[int]:
        """Token ids of a text or of chat messages; what are token ids already is checked."""
        if isinstance(value, str):
            return self._tokens(value, where)
        try:
            rows = list(value)
        except TypeError:
            raise SpecConfigError(f"{where}: {_EXPECTED}, found {value!r:.80}") from None
        if rows and all(isinstance(row, Mapping) for row in rows):
            try:
                text = self.tokenizer.apply_chat_template(
                    [dict(row) for row in rows], add_generation_prompt=True, tokenize=False
                )
            except Exception as error:  # templates raise what they like
                raise SpecConfigError(f"{where}: the tokenizer's chat template refused it: {error}") from error
            return self._tokens(text, where)
        return [self._known(token, value, where) for token in rows]

    def _tokens(self, text: str, where: str) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        except (TypeError, ValueError) as error:  # half of a pair of surrogates, which JSON can hold
            raise SpecConfigError(f"{where}: the tokenizer refused the text {text!r:.80}: {error}") from error

    def _known(self, token: Any, value: Any, where: str) -> int:
        """A token id that the policy has: another one would be read from beyond its embedding."""
        whole = isinstance(token, Integral) or (isinstance(token, Real) and float(token).is_integer())
        if isinstance(token, bool) or not whole:
            raise SpecConfigError(f"{where}: {_EXPECTED}, found {value!r:.80}")
        found = int(token)
        if found < 0 or (self.vocabulary is not None and found >= self.vocabulary):
            known = "0 or more" if self.vocabulary is None else f"0 to {self.vocabulary - 1}"
            raise SpecConfigError(
                f"{where}: token id {found} is not in the policy's vocabulary ({known}); tokenize the text with the policy's "
                "tokenizer"
            )
        return found
