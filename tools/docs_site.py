"""The documentation site: ``make docs`` runs this file, and mkdocs loads it as a hook (``mkdocs.yml``).

What the code knows is written at build time: commands, hooks, and the marked tables of options, metrics and codes. Pages that
live elsewhere, such as the README, become pages of the site. A link to a file that is no page leads into the repository, where
pyproject.toml names its address, else it is the file's name. A link to nothing fails the build.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import posixpath
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import tomllib

if TYPE_CHECKING:
    import click
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: pages that live elsewhere in the repository, by their place in the site
ELSEWHERE = {
    "index.md": "README.md",
    "get-started/quickstart.md": "examples/quickstart/README.md",
    "develop/method.md": "examples/minimal_method/README.md",
    "develop/minimal-adapter.md": "examples/minimal_adapter/README.md",
    "develop/tests.md": "CONTRIBUTING.md",
    "results/notebook.md": "examples/bench/NOTEBOOK.md",
}
#: a recorded run, of which ``guides/reading-metrics.md`` shows a picture
RUN = ROOT / "examples" / "bench" / "results" / "quickstart-verl.json"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"(```.*?```)", re.S)
log = logging.getLogger("mkdocs.hooks.docs_site")


# ---- from the code


def commands() -> str:
    """The page of all commands: what each prints for ``--help``."""
    import click

    from spec_plugin.commands.cli import main

    context = click.Context(main, info_name="spec-plugin", max_content_width=90, terminal_width=90)
    parts = [_block(main, context)]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        if command is not None:
            inner = click.Context(command, context, name, max_content_width=90, terminal_width=90)
            parts.append(f"## spec-plugin {name}\n\n{_block(command, inner)}")
    return "\n\n".join(parts)


def _block(command: click.Command, context: click.Context) -> str:
    return f"```text\n{command.get_help(context).strip()}\n```"


def hooks() -> str:
    """The page of all hooks: the docstrings of ``spec_plugin/api/hookspecs.py``."""
    from spec_plugin.api import hookspecs

    parts = [_as_markdown(hookspecs.__doc__ or "")]
    marker = f"{hookspecs.PROJECT}_spec"
    for name, function in vars(hookspecs).items():
        if hasattr(function, marker):
            answers = (
                "the first answer that is not None holds"
                if getattr(function, marker)["firstresult"]
                else "all are called"
            )
            said = _as_markdown(inspect.getdoc(function) or "")
            parts.append(
                f"## {name}\n\n```python\n{name}{_signature(function)}\n```\n\n{said}\n\nOf several plugins {answers}."
            )
    return "\n\n".join(parts)


def _signature(function: Callable[..., object]) -> str:
    """Arguments and answer, with types as they are written, which ``from __future__ import annotations`` keeps as texts."""
    return str(inspect.signature(function)).replace("'", "")


def _as_markdown(docstring: str) -> str:
    """A docstring of ours, in Google's style, as Markdown."""
    text = inspect.cleandoc(docstring).replace("``", "`").replace("::\n", ":\n")
    text = re.sub(r"^(Raises|Returns|Args):\n((?:    .*\n?)+)", _section, text, flags=re.M)
    return re.sub(
        r" \(([AS], )?[AS]\) |^\(((?:[AS], )*[AS])\) ", lambda m: f"*Called in: {m[2]}.* " if m[2] else m[0], text
    )


def _section(found: re.Match[str]) -> str:
    entries = re.sub(r"\n {8,}", " ", inspect.cleandoc(found[2]) if found[1] == "Returns" else found[2])
    lines = [line.strip() for line in entries.splitlines() if line.strip()]
    joined = " ".join(lines) if found[1] == "Returns" else "\n".join(f"- {line}" for line in lines)
    return f"**{found[1]}**\n\n{joined}\n"


def options() -> str:
    """The table of options."""
    from spec_plugin.api.config import options_table

    return options_table()


def metrics() -> str:
    """The table of metrics, from the schema that the conformance kit holds runs against."""
    from spec_plugin_conformance.metrics import SCHEMA

    return "\n".join(["| metric | meaning |", "| --- | --- |", *(f"| `{m.name}` | {m.meaning} |" for m in SCHEMA)])


def codes() -> str:
    """The tables of ``spec/state`` and ``spec/reason``."""
    from spec_plugin.api.speculation import Reason, Speculation

    found = []
    for name, members in (("spec/state", Speculation), ("spec/reason", Reason)):
        rows = [f"| {int(code)} | {code.name} | {code.meaning} |" for code in members]
        found.append("\n".join([f"`{name}`:\n", "| number | name | meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(found)


def picture() -> str:
    """A recorded run's metrics as wandb would draw them, one SVG in the page's own colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = [step["metrics"] for step in json.loads(RUN.read_text())["results"]["runs"]["flag"]]
    drawn = ("spec/acceptance_length", "spec/k_b8", "spec/speedup_realised", "spec/net_so_far_s")
    ink = "#00f001"
    colours = dict.fromkeys(("axes.edgecolor", "text.color", "xtick.color", "ytick.color"), ink)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "docs", "font.size": 9, **colours}):
        figure = Figure(figsize=(7.4, 4.6), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2).flat, drawn, strict=True):
            points = [(i, s[f"actor/{name}"]) for i, s in enumerate(steps, 1) if f"actor/{name}" in s]
            axes.plot(*zip(*points, strict=True), marker=".", color="#7986cb")
            axes.axhline(0 if "net" in name else 1, color=ink, linewidth=0.6, linestyle=":")
            axes.set_title(name, fontsize=9)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    return f'<div class="picture">{svg[svg.index("<svg") :].replace(ink, "currentColor")}</div>'


#: by its marks in a page, what is made when the site is built
MADE = {
    "options": options,
    "metrics": metrics,
    "codes": codes,
    "commands": commands,
    "hooks": hooks,
    "picture": picture,
}


# ---- what mkdocs calls


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs``."""
    from mkdocs.structure.files import File

    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what the code knows, and make links what they are in the site."""
    uri = page.file.src_uri
    for name, make in MADE.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin in markdown:
            before, rest = markdown.split(begin)
            markdown = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    pieces = FENCED.split(markdown)
    pieces[::2] = [LINK.sub(lambda m: _link(m, uri, files), piece) for piece in pieces[::2]]
    pieces[1::2] = [_scrolling(block) if block.startswith("```mermaid") else block for block in pieces[1::2]]
    return "".join(pieces)


def _scrolling(diagram: str) -> str:
    return f'<div class="diagram" markdown>\n\n{diagram}\n\n</div>'


def _link(found: re.Match[str], uri: str, files: Files) -> str:
    """A link of the page ``uri`` as the site has it."""
    target, anchor = found["target"], found["anchor"] or ""
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    source = ELSEWHERE.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    there = next((name for name, file in ELSEWHERE.items() if file == path), path.removeprefix("docs/"))
    if files.get_file_from_path(there):
        return f"{found['image']}[{found['text']}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"
    if not (ROOT / path).exists():
        log.warning(f"{source}: the link to {target} leads nowhere")
    if address := repository():
        return f"[{found['text']}]({address}/blob/main/{path}{anchor})"
    named = found["text"].strip("`")
    return f"`{path}`" if named in (path, target) else f"{found['text']} (`{path}`)"


def repository() -> str:
    """Where the repository can be read, as pyproject.toml says; nothing where it does not."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return next((urls[name].rstrip("/") for name in ("Repository", "Source", "Source code") if name in urls), "")


# ---- the command line


def main() -> None:
    """Build the site into ``site/``; exit code 1 where mkdocs is missing, or where it warns of anything."""
    if missing := [name for name in ("mkdocs", "material") if find_spec(name) is None]:
        sys.exit(
            f"docs_site: {' and '.join(missing)} not found in {sys.executable}: pip install 'mkdocs-material>=9.6', "
            "or `make env`, whose tools/requirements-verl.txt has it"
        )
    os.chdir(ROOT)
    from mkdocs.__main__ import cli

    cli(["build", "--strict", *sys.argv[1:]])


if __name__ == "__main__":
    main()
