"""Option values, drafts and command lines at random, in one process: each is answered, in time, and in our own words.

``python -m builders.fuzz 3000`` runs so many (some minutes); ``test_fuzz.py`` a few. A draft that was damaged must be refused by
whoever reads it, and one that was not must be taken.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from builders.bad_input import TARGET, draft_in, of_a_run, written
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.commands.cli import main as command

SECONDS = 30  # in which anything is answered
WORDS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 0.5, 1e308, -5, 10**40, float("nan"), float("inf"), True, None),
    *(
        "",
        " ",
        "0",
        "-1",
        "1e9",
        "true",
        "null",
        "auto",
        "none",
        ".",
        "..",
        "/",
        "/dev/zero",
        "/dev/null",
        "~nobody/x",
        "a/b",
        "a/b@c",
    ),
    *(
        "eagle",
        "eagle3",
        "ngram",
        "suffix",
        "mtp",
        "frozen",
        "draft_model",
        "known",
        "[1, 2]",
        "{}",
        "{[]: 1}",
        "[" * 300,
    ),
    *(
        "\x00",
        "\udce9",
        "é" * 50,
        "x" * 5000,
        "--",
        "-",
        "=",
        "a=b",
        "1" + "0" * 50,
        "2024-13-45",
        [1, 2],
        [],
        {},
        {"a": 1},
        ["x"],
    ),
)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """``TimeoutError`` where a block takes longer: it waits for a pipe, or reads a device."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def an_option(rng: random.Random, _: Path) -> str:
    """Of some values at random: parsed, or refused in words that name one of them."""
    names = rng.sample([*SpecConfig.model_fields, "no_such_option"], rng.choice((1, 1, 3)))
    asked = {name: rng.choice(WORDS) for name in names}
    try:
        SpecConfig.parse(asked)
    except SpecConfigError as error:
        assert any(name in str(error) for name in names) and len(str(error)) < 3000, error
        return "option refused"
    return "option taken"


Tensors = dict[str, torch.Tensor]


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")

    return damage


def _config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: written(folder, {**json.loads((folder / "config.json").read_text()), **changes})


def _pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    homes = {"fc.weight": "model-00001-of-00002.safetensors", "norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


_MLP = "midlayer.mlp.up_proj.weight"
#: what is wrong with a draft: whoever starts with it is refused
DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "int8": _tensors(lambda t: t.update({_MLP: t[_MLP].to(torch.int8)})),
    "bool": _tensors(lambda t: t.update({_MLP: t[_MLP].bool()})),
    "missing": _tensors(lambda t: t.pop(_MLP)),
    "no norm": _tensors(lambda t: t.pop("norm.weight")),
    "transposed": _tensors(lambda t: t.update({_MLP: t[_MLP].T})),
    "fc too wide": _tensors(lambda t: t.update({"fc.weight": torch.zeros(32, 128)})),
    "nan": _tensors(lambda t: t[_MLP].fill_(torch.nan)),
    "map too short": _tensors(lambda t: t.update({"d2t": t["d2t"][:-1]})),
    "map too far": _tensors(lambda t: t.update({"d2t": t["d2t"] + 60})),
    "cut off": _cut,
    "index of nothing": _index,
    "a pipe": _pipe,
    "short": _config(max_position_embeddings=32),
    "code": _config(auto_map={"AutoConfig": "somebody/else--evil.Config"}),
    "UTF-16": lambda folder: (folder / "config.json").write_bytes("{}".encode("utf-16")),
    "deep": lambda folder: written(folder, "[" * 100_000),
    "a list": lambda folder: written(folder, "[]"),
    "text for a size": _config(hidden_size="32"),
}
#: what only a draft that is trained may not have
UNTRAINABLE: Mapping[str, Callable[[Path], object]] = {
    "window": _config(layer_types=["sliding_attention"], sliding_window=8),
    "partial rotary": _config(partial_rotary_factor=0),
    "quantized": _config(quantization_config={"quant_method": "fp8"}),
    "rope": _config(rope_scaling={"rope_type": "longrope", "factor": 2.0}, rope_parameters=None),
}
HARMLESS: Mapping[str, Callable[[Path], object]] = {
    "whole": lambda folder: None,
    "speculators' own entry": _config(auto_map={"": "config.Eagle3SpeculatorConfig"}),
    "a note": _config(note={"of": ["anything"]}),
}


def a_draft(rng: random.Random, folder: Path) -> str:
    """A draft, whole or not, trained or served as it is."""
    trained = rng.random() < 0.5
    shutil.rmtree(folder / "draft", ignore_errors=True)
    draft = draft_in(folder / "draft", pruned=32)
    ways = {**DAMAGE, **(UNTRAINABLE if trained else {}), **HARMLESS}
    how = rng.choice(sorted(ways))
    ways[how](draft)
    told = {"method": "eagle3"} if trained else {"method": rng.choice(["frozen", "auto"]), "train": False}
    said = of_a_run(written(folder / "target", TARGET), draft=str(draft), **told)
    assert bool(said) != (how in HARMLESS), f"{how}, {told}: {said or 'taken'}"
    return f"draft {'refused' if said else 'taken'}"


def a_command(rng: random.Random, folder: Path) -> str:
    """A command line of words at random, some of them files of all kinds."""
    files = [str(path) for path in sorted(folder.iterdir())]
    words = [str(word) for word in WORDS if word is not None and "\x00" not in str(word)] + files * 4

    def some(most: int) -> list[str]:
        return rng.choices(words, k=rng.randint(0, most))

    name = rng.choice(list(SpecConfig.model_fields))
    model = ["--actor.model_name_or_path", str(folder / "target"), "--vllm.num_engines", "1"]
    lines: list[Callable[[], list[str]]] = [
        lambda: ["check", "openrlhf", "--", *model, f"--spec.{name}", rng.choice(words), *some(1)],
        lambda: ["check", "openrlhf", "--model-config", rng.choice(words), "--", *model],
        lambda: [
            "check",
            "trl",
            "--",
            "trl",
            "grpo",
            "--model_name_or_path",
            str(folder / "target"),
            "--config",
            rng.choice(files),
        ],
        lambda: ["check", "trl", "--", rng.choice([f for f in files if f.endswith(".py")]), f"--{name}", *some(2)],
        lambda: ["check", *some(3)],
        lambda: ["report", *some(3), "--json"],
        lambda: [
            "project",
            "--model",
            rng.choice(words),
            "--card",
            rng.choice([*words, "H100", "H100"]),
            "--batch",
            rng.choice(words),
        ],
        lambda: ["options", *some(1)],
        lambda: some(4),
    ]
    line = rng.choice(lines)()
    done = CliRunner().invoke(command, line)
    assert isinstance(done.exception, SystemExit | None), (line, done.exception)
    assert done.exit_code in (0, 1, 2) and "did not expect this" not in done.output, (line, done.output[-500:])
    return f"command ended with {done.exit_code}"


def lay_out(folder: Path) -> None:
    """Files that words of command lines name."""
    written(folder / "target", TARGET)
    contents: dict[str, str | bytes] = {
        "utf16.yaml": "a: 1".encode("utf-16"),
        "deep.yaml": "[" * 20_000,
        "date.yaml": "a: 2024-13-45",
        "list.json": "[1, 2]",
        "null.yaml": "",
        "right.json": json.dumps(TARGET),
        "zeros.bin": bytes(4096),
        "script.py": "from trl import GRPOConfig\nGRPOConfig(use_vllm=True, learning_rate={[]: 1})",
        "broken.py": "def (",
        "deep.py": "x = " + "(" * 5000,
        "log.jsonl": '{"step": 1, "data": {"timing_s/step": -5}}\n{"step": 1e400}\n[[',
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(folder / "pipe.yaml")


def attack(many: int, seed: int = 0, stop: bool = True) -> tuple[Counter[str], list[str]]:
    """So many attempts; what came of them, and what went wrong.

    Args:
        many: of all kinds together.
        seed: of all of them.
        stop: raise the first that goes wrong.

    Raises:
        BaseException: what went wrong.
    """
    outcomes, wrong = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        lay_out(folder)
        for number in range(many):
            rng = random.Random(f"{seed}.{number}")
            kind = rng.choices((an_option, a_draft, a_command), (4, 3, 3))[0]
            try:
                with within(SECONDS):
                    outcomes[kind(rng, folder)] += 1
            except Exception as error:
                if stop:
                    raise AssertionError(f"seed {seed}, number {number}, {kind.__name__}") from error
                wrong.append(f"{number} {kind.__name__}: {traceback.format_exc(limit=-4)}")
    return outcomes, wrong


if __name__ == "__main__":
    told, failures = attack(int(sys.argv[1]), int((*sys.argv[2:], "0")[0]), stop=False)
    print("\n".join(failures), dict(told), f"{len(failures)} went wrong", sep="\n")
    sys.exit(bool(failures))
