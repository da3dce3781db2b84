"""Files of checkpoints from outside: JSON, an index, safetensors; read without trust in them, and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.outside import Index, read, short_repr

#: a config.json has a few KiB, and the index of the largest checkpoint a few MiB
_MOST_BYTES = 1 << 26


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        CheckpointError: if it is missing, torn, no JSON object, or too large to be one of ours.
    """
    try:
        _refuse_odd(file)
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(
                f"{file} cannot be read: it has {file.stat().st_size} bytes, more than any config.json; give another folder"
            )
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(
            f"{file} cannot be read: it is nested too deeply to be a config.json; give another folder"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; give the folder of a whole checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; it is no JSON: correct it, or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object, but {short_repr(value)}; give the whole config.json")
    return value


#: in a DFlash draft's folder, the vector of a token that is not known yet; vLLM reads it with torch's ``weights_only``
MASK_EMBEDDING = "mask_embedding.pt"
#: fields by which a config.json names code to run: of the folder, or of anybody's repository ("someone/repo--file.Class")
CODE = ("auto_map", "custom_pipelines")
#: files of a checkpoint in which vLLM and transformers look for them
_CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the fields that name code, in whatever part of it they stand."""
    return {
        name: without_code(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in CODE
    }


def own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what is the file's and not the shape's: its dtype, its writer, and any code that it names."""
    of_the_file = ("dtype", "torch_dtype", "transformers_version")
    return {name: value for name, value in without_code(config).items() if name not in of_the_file}


def refuse_code(folder: Path) -> None:
    """A checkpoint that brings code of its own, which is run where the policy's ``trust_remote_code`` is on.

    An ``auto_map`` that names none of the folder's files, nor another repository's, is nothing to run: speculators saves each
    draft with ``{"": "config.Eagle3SpeculatorConfig"}``, and without ``config.py``.

    Raises:
        DraftConfigError: naming file, field and what it names.
        CheckpointError: if a file cannot be read.
    """
    for file, named in ((file, named) for file, config in _that_name_code(folder) for named in _named(config, folder)):
        raise DraftConfigError(
            f"{file} names code to run, {named}: a draft is weights and nothing else; take "
            f"{' and '.join(CODE)} out of the file if the draft works without, or choose another draft"
        )


def configs_with_code(folder: Path) -> dict[str, dict[str, Any]]:
    """Those configs of a checkpoint that name code, by file name, without it.

    Raises:
        CheckpointError: if one cannot be read.
    """
    return {file.name: without_code(config) for file, config in _that_name_code(folder)}


def _that_name_code(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in (folder / name for name in _CONFIGS):
        config = read_json(file) if file.exists() else {}
        if without_code(config) != config:
            yield file, config


def _named(config: Mapping[str, Any], folder: Path) -> Iterator[str]:
    for name, value in config.items():
        if name in CODE:
            if name != "auto_map" or not isinstance(value, Mapping) or any(_runs(v, folder) for v in value.values()):
                yield f"{name}={short_repr(value)}"
        elif isinstance(value, Mapping):
            yield from _named(value, folder)


def _runs(reference: Any, folder: Path) -> bool:
    """Could ``module.Class`` of an ``auto_map`` be loaded: from a file of the folder, or from another repository."""
    return (
        not isinstance(reference, str) or "--" in reference or (folder / f"{reference.partition('.')[0]}.py").exists()
    )


def places(folder: Path) -> dict[str, Path] | None:
    """Which file holds each tensor, from the folder's index; None where it has none.

    Raises:
        CheckpointError: if the index cannot be read, names a file outside of the folder, or lies beside another whole checkpoint.
        DraftConfigError: if it is no index.
    """
    file = folder / "model.safetensors.index.json"
    if not file.exists():
        return None
    found = read(Index, read_json(file), str(file)).weight_map
    if odd := sorted({name for name in found.values() if Path(name).name != name}):
        raise CheckpointError(f"{file} names {odd[0]!r}: expected files of this folder; correct it there")
    single = folder / "model.safetensors"
    if single.name not in found.values() and single.exists():  # where it was saved again, in one file or in several
        raise CheckpointError(
            f"{single} lies beside {file.name}, which does not name it: transformers would load the former, and vLLM what the "
            "latter names; remove the one that is not meant"
        )
    return {tensor: folder / name for tensor, name in found.items()}


def weight_files(folder: Path) -> list[Path]:
    """Those that a folder's index names, or every safetensors file of it, in order of name; they may be missing.

    Raises:
        CheckpointError: as ``places``.
        DraftConfigError: likewise.
    """
    indexed = places(folder)
    return sorted(folder.glob("*.safetensors") if indexed is None else set(indexed.values()))


def check_offsets(d2t: Any, vocab_size: int, where: object, distinct: bool = True) -> None:
    """Does each token of a pruned draft stand for one of the target's: on a card the engine would die of one that does not.

    Args:
        d2t: [Vd] whole offsets, a tensor or numpy's array: draft id i is target id ``i + d2t[i]``.
        vocab_size: the target's.
        where: file or folder, for the messages.
        distinct: may no two stand for the same; a refresh of such a draft is refused.

    Raises:
        DraftConfigError: naming the first that does not.
    """
    kind = str(d2t.dtype).removeprefix("torch.")
    if "int" not in kind or d2t.ndim != 1:
        raise DraftConfigError(
            f"d2t in {where} is {kind} of shape {list(d2t.shape)}: expected int64 offsets, one a token; export the draft again"
        )
    offsets = d2t.tolist()
    if wrong := [(i, offset) for i, offset in enumerate(offsets) if not 0 <= i + offset < vocab_size]:
        at, offset = wrong[0]
        raise DraftConfigError(
            f"d2t[{at}]={offset} in {where} makes draft token {at} the target's token {at + offset}: expected 0 to "
            f"{vocab_size - 1}; {len(wrong)} of {len(offsets)} are like it: take a draft that was made for this target"
        )
    doubled = len(offsets) - len({i + offset for i, offset in enumerate(offsets)})
    if distinct and doubled:
        raise DraftConfigError(
            f"d2t in {where} maps {doubled} draft tokens to a target token that another one has; export the draft again"
        )


@contextmanager
def opened(file: Path, framework: str) -> Iterator[Any]:
    """A safetensors file, as ``safe_open`` opens it; what goes wrong while it is read is told with its name.

    Args:
        file: that holds tensors.
        framework: ``pt``, or ``numpy``, which knows no bfloat16 and loads no torch.

    Raises:
        CheckpointError: if it is missing, torn, or of a kind that nobody here reads.
    """
    from safetensors import SafetensorError, safe_open  # the doctor also works where it is missing

    try:
        _refuse_odd(file)
        with safe_open(str(file), framework=framework) as f:
            yield f
    except (CheckpointError, DraftConfigError):  # of the reader
        raise
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {type(error).__name__}: {error}; it is torn, or no safetensors: copy it again"
        ) from error


def _refuse_odd(file: Path) -> None:
    """A pipe would never end, and a device neither."""
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} cannot be read: it is no file; give a checkpoint's folder")
