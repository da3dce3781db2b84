from __future__ import annotations

import re

import pytest
from builders.paths import ROOT
from builders.session import session_with, step

from spec_plugin import __version__
from spec_plugin.api.config import options_table

PAGES = [str(file.relative_to(ROOT / "docs")) for file in sorted(ROOT.glob("docs/**/*.md"))]
NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/bench/NOTEBOOK.md",
    *(f"docs/{page}" for page in PAGES),
)
TEXTS = {name: (ROOT / name).read_text() for name in NAMES}


def between(name: str) -> str:
    page = TEXTS[f"docs/reference/{name}.md"]
    (found,) = re.findall(rf"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", page, re.S)
    return found


def test_the_options_table_is_the_one_of_the_code():
    assert between("options") == options_table(), "paste the output of: spec-plugin options --markdown"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_make_command_that_is_named_exists(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXTS[name], re.M))
    assert named and named <= targets


def test_every_spec_plugin_command_that_is_named_exists():
    import click

    from spec_plugin.commands.cli import main

    context = click.Context(main)
    there = {name for name in main.list_commands(context) if main.get_command(context, name)}
    named = set(re.findall(r"(?:^|`)spec-plugin ([a-z]+)", "\n".join(TEXTS.values()), re.M))
    assert {"doctor", "options", "hooks"} <= named <= there


def test_the_metrics_table_names_exactly_what_a_run_logs(tmp_path):
    session = session_with(train_tokens=32)
    logged = step(session, 0, tmp_path / "a") | step(session, 1, tmp_path / "b")
    session.ledger.close()
    logged |= session.metrics()
    assert not session.failed, session.failure
    general = {re.sub(r"pos_\d+$", "pos_{i}", re.sub(r"_b\d+$", "_b{size}", name)) for name in logged}
    of_one_method = {"spec/memory_tokens", "spec/shadow_tokens_per_forward"}  # suffix
    of_one_method |= {
        "spec/entropy",
        "spec/ceiling",
    }  # a trained draft, from the first text on that is long enough to be replayed
    assert set(re.findall(r"^\| `(spec/[^`]+)`", between("metrics"), re.M)) == general | of_one_method


def anchors(text: str) -> set[str]:
    """What a link may name behind #, as GitHub makes it of the headings."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("name", list(TEXTS))
def test_links_inside_the_repository_lead_somewhere(name):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", TEXTS[name]):
        file = (ROOT / name).parent / link if link else ROOT / name
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text()), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_in_the_navigation_of_the_site(page):
    assert re.search(rf"[ ]{re.escape(page)}$", (ROOT / "mkdocs.yml").read_text(), re.M)


@pytest.mark.parametrize("name", list(TEXTS))
def test_no_path_of_a_machine_is_in_the_texts(name):
    assert not re.findall(r"(?<![\w.])/(?:work|root|home|tmp|Users)/", TEXTS[name])


def test_the_changelog_knows_this_version():
    assert f"### {__version__}" in TEXTS["CHANGELOG.md"] or f"## [{__version__}]" in TEXTS["CHANGELOG.md"]


def test_the_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_no_page_holds_both_sides_of_a_merge() -> None:
    pages = [
        page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    ]
    assert len(pages) > 10
    torn = {
        page.name
        for page in pages
        for line in page.read_text().splitlines()
        if line.startswith(("<<<<<<< ", ">>>>>>> "))
    }
    assert torn == set()
