"""Which versions of trainers and vLLM can be installed together, and which pairs the kit has run on: ``make versions``.

A resolver is asked (uv; it reads what the packages declare and downloads none of them), a few seconds for each pair. Prints a
table in Markdown; ``--write`` puts it into docs/supported.md. Standard library only; needs an environment of ``make_env.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "supported.md"
BEGIN, END = "<!-- versions: made by `make versions`, do not edit -->", "<!-- end of versions -->"
#: as a user asks for them; the extra of OpenRLHF's says which vLLM it can be used with
TRAINERS = {
    "verl": "verl==0.9.1",
    "OpenRLHF": "openrlhf[vllm-latest]==0.11.2",
    "TRL": "trl[vllm]==1.16.0",
    "none": "",
}
#: of TRL, which comes out every other week, all that its adapter takes; what it wraps is there in each (tools/trl_symbols.py)
TRL = ("1.8.0", "1.9.0", "1.10.0", "1.11.0", "1.12.0", "1.13.0", "1.14.0", "1.15.0", "1.16.0")
VLLM = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
PINS = {"verl": "0.24.0", "OpenRLHF": "0.29.0"}
#: parts of ``tools/check.py`` that run the kit on a pair
KITS = {
    ("verl", "0.24.0"): "verl-vllm0.24",
    ("verl", "0.26.0"): "verl-vllm0.26",
    ("verl", "0.29.0"): "kit-verl",
    ("verl", "0.31.0"): "verl-vllm0.31",
    ("OpenRLHF", "0.29.0"): "kit-openrlhf",
    ("OpenRLHF", "0.31.0"): "openrlhf-vllm0.31",
    ("TRL", "0.29.0"): "kit-trl",
    ("none", "0.29.0"): "kit-minimal",
    ("none", "0.32.0"): "minimal-vllm0.32",
}
#: what only builds with a compiler of CUDA's, and decides nothing here
_UNBUILT = ("flash-attn", "deepspeed")


@dataclass(frozen=True)
class Pair:
    """What the resolver says of one trainer with one vLLM."""

    trainer: str
    vllm: str
    found: dict[str, str]  # versions by package; empty if they cannot be installed together
    conflict: str  # in the resolver's words, then

    def cell(self, kit: str) -> str:
        """For the table."""
        if not self.found:
            return f"no: {self.conflict}"
        pin = ", the trainer's pin" if PINS.get(self.trainer) == self.vllm else ""
        return f"yes{pin}: torch {self.found['torch']}, transformers {self.found['transformers']}" + (
            f"; kit: {kit}" if kit else ""
        )


def resolve(uv: Sequence[str], trainer: str, vllm: str, python: str) -> Pair:
    """Ask for both and for spec-plugin's own requirements.

    Args:
        uv: the command.
        trainer: one of ``TRAINERS``, or a requirement of its own.
        vllm: its version; empty: the newest that the trainer takes.
        python: for which Python.
    """
    wanted = [TRAINERS.get(trainer, trainer), f"vllm=={vllm}" if vllm else "vllm", *own_requirements()]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("".join(f'{name}; sys_platform == "never"\n' for name in _UNBUILT))
        overrides.flush()
        command = [*uv, "pip", "compile", "-", "-q", "--no-header", "--no-annotate", "--python-version", python]
        command += ["--override", overrides.name, "--index-strategy", "unsafe-best-match", *index()]
        done = subprocess.run(command, input="\n".join(wanted), text=True, capture_output=True, cwd=ROOT)
    if done.returncode:
        return Pair(trainer, vllm, {}, conflict_in(done.stderr))
    return Pair(trainer, vllm, dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.M)), "")


def conflict_in(said: str) -> str:
    """The two requirements that do not meet, in one clause; of another failure its last line."""
    text = " ".join(said.split())
    if "No solution found" not in text:
        return f"not resolved ({text[-120:]})"
    depends = dict.fromkeys(re.findall(r"([\w.\[\]-]+?)[=>]=[\d.]+ depends on (\w[\w.-]*[=<>!][^\s]*)", text))
    clauses = [f"{name} needs {what.rstrip(',').replace(',', ', ')}" for name, what in depends]
    return ", ".join(clauses[:2]) or text[:160]


def own_requirements() -> list[str]:
    """What spec-plugin itself asks for."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert block is not None
    return re.findall(r'"([^"]+)"', block.group(1))


def index() -> list[str]:
    """The package index that pip uses here, which uv does not know of itself."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True)
    found = re.search(r"index-url='([^']+)'", "\n".join(x for x in done.stdout.splitlines() if "extra" not in x))
    return ["--default-index", found.group(1)] if found else []


def kit(trainer: str, vllm: str) -> str:
    """What the last run of the kit on this pair ended with; nothing where it was not run."""
    part = KITS.get((trainer, vllm))
    result = ROOT / ".cache" / "check" / str(part) / "result.json"
    if part is None or not result.is_file():
        return ""
    log = (result.parent / "log").read_text(errors="replace")
    # its own closing line; where a test runs it, only its exit code is seen
    ended = re.findall(r"^\d+ (?:passed|failed)[^\n]* in [\d.]+s", log, re.M)
    counts = re.findall(r"\d+ (?:passed|failed|skipped)", ended[-1]) if ended else []
    return ", ".join(counts) or ("failed" if json.loads(result.read_text())["rc"] else "passed")


def table(pairs: Sequence[Pair]) -> str:
    """In Markdown: a row for each vLLM, a column for each trainer."""
    cells = {(p.trainer, p.vllm): p.cell(kit(p.trainer, p.vllm)) for p in pairs}
    trainers = list(dict.fromkeys(p.trainer for p in pairs))
    heads = [re.sub(r"\[.*?\]", "", TRAINERS[t]).replace("==", " ") or "no trainer" for t in trainers]
    lines = ["| vLLM | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(trainers)]
    lines += [
        f"| {vllm} | " + " | ".join(cells[t, vllm] for t in trainers) + " |"
        for vllm in dict.fromkeys(p.vllm for p in pairs)
    ]
    return "\n".join(lines)


def table_of_trl(pairs: Sequence[Pair]) -> str:
    """In Markdown: a row for each version of TRL, with the newest vLLM that its extra allows."""
    lines = ["| trl | the newest vLLM that `trl[vllm]` takes | |", "| --- | --- | --- |"]
    for version, pair in zip(TRL, pairs, strict=True):
        with_it = (
            f"torch {pair.found['torch']}, transformers {pair.found['transformers']}" if pair.found else pair.conflict
        )
        lines.append(f"| {version} | {pair.found.get('vllm', 'none')} | {with_it} |")
    return "\n".join(lines)


def written(page: str, made: str) -> str:
    """The page with the table between its two marks.

    Raises:
        ValueError: if it has no such marks.
    """
    begin, end = page.find(BEGIN), page.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{PAGE.name} has no lines {BEGIN!r} and {END!r} between which the table stands")
    return f"{page[: begin + len(BEGIN)]}\n\n{made}\n\n{page[end:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the resolver for all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.11", help="for which Python (default: 3.11)")
    parser.add_argument("--write", action="store_true", help="put the table into docs/supported.md")
    options = parser.parse_args(argv)
    python = next((p for p in (ROOT / ".envs").glob("*/bin/python")), None)
    if python is None or subprocess.run([python, "-m", "uv", "--version"], capture_output=True).returncode:
        sys.exit("versions: needs uv in an environment; run: make env")
    uv = [str(python), "-m", "uv"]
    with ThreadPoolExecutor(2) as pool:
        pairs = list(pool.map(lambda p: resolve(uv, *p, options.python), [(t, v) for v in VLLM for t in TRAINERS]))
        of_trl = list(pool.map(lambda v: resolve(uv, f"trl[vllm]=={v}", "", options.python), TRL))
    made = f"{table(pairs)}\n\n{table_of_trl(of_trl)}"
    print(made)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
