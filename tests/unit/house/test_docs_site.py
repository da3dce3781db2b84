"""tools/docs_site.py: what the site's pages are made of; ``make docs`` builds it, strictly."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import docs_site
import pytest
from builders.paths import ROOT

from draft_training import DraftConfig, TrainSettings, training_memory
from spec_plugin.api import hookspecs
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.commands.doctor import built_in_method
from spec_plugin.methods.sample_method import kept_logits
from spec_plugin.policy.online_training import TRAIN_TOKENS

FAMILIES = json.loads((ROOT / "examples" / "bench" / "data" / "model_families.json").read_text())
PAGES = {"guards.md", "results.md", "guides/async.md", *docs_site.ELSEWHERE}


def linked(page: str, link: str) -> str:
    """A link in a page of the site, as the site has it."""
    files: Any = SimpleNamespace(get_file_from_path=lambda path: path if path in PAGES else None)
    found = docs_site.LINK.fullmatch(link)
    assert found is not None
    return docs_site._link(found, page, files)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[how](docs/guards.md#a)", "[how](guards.md#a)"),  # of the README, which lies above
        ("guides/async.md", "[how](../guards.md)", "[how](../guards.md)"),
        ("guides/async.md", "[n](../../examples/bench/NOTEBOOK.md#x)", "[n](../results/notebook.md#x)"),
        ("results/notebook.md", "[how](../../docs/guards.md)", "[how](../guards.md)"),
        ("index.md", "[paper](https://arxiv.org/abs/2604.26779)", "[paper](https://arxiv.org/abs/2604.26779)"),
        ("index.md", "[here](#a)", "[here](#a)"),
    ],
)
def test_a_link_to_a_page_leads_to_it_from_wherever_it_stands(page: str, link: str, expected: str) -> None:
    assert linked(page, link) == expected


def test_a_link_to_another_file_leads_into_the_repository_or_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "repository", lambda: "")
    assert linked("index.md", "[`hooks`](spec_plugin/api/hookspecs.py)") == "`hooks` (`spec_plugin/api/hookspecs.py`)"
    assert linked("index.md", "[Makefile](Makefile)") == "`Makefile`"
    monkeypatch.setattr(docs_site, "repository", lambda: "https://example.org/spec-plugin")
    assert linked("guards.md", "[m](../Makefile)") == "[m](https://example.org/spec-plugin/blob/main/Makefile)"


def test_a_link_that_leads_nowhere_is_a_warning_of_mkdocs_which_fails_a_strict_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("mkdocs"), "propagate", True)
    linked("guards.md", "[x](explain/controller.md)")
    assert not caplog.records, "it is a file, if no page of this test"
    linked("guards.md", "[x](explain/nothing.md)")
    assert [r.levelname for r in caplog.records] == ["WARNING"] and caplog.records[0].name.startswith("mkdocs.")
    assert "docs/guards.md: the link to explain/nothing.md leads nowhere" in caplog.text


def test_the_page_of_hooks_has_each_with_its_arguments_and_what_it_raises() -> None:
    page = docs_site.hooks()
    names = [name for name in vars(hookspecs) if name.startswith("spec_")]
    assert re.findall(r"^## (\w+)$", page, re.M) == names
    assert "spec_train_draft(step: int, seconds: float) -> None" in page
    assert "- LogprobProvenanceError: if any of them is not the target's at the recorded policy version." in page
    assert page.count("the first answer that is not None holds") == 6 and "``" not in page.replace("```", "")


def test_the_page_of_commands_has_the_help_of_each() -> None:
    page = docs_site.commands()
    assert {"check", "doctor", "hooks", "options", "report", "train"} <= set(
        re.findall(r"^## spec-plugin (\w+)$", page, re.M)
    )
    assert "Usage: spec-plugin train [OPTIONS]" in page and "--gpu-memory-utilization" in page


def test_the_tables_of_the_reference_stand_in_the_pages_as_the_code_has_them() -> None:
    pages = "".join(file.read_text() for file in (ROOT / "docs" / "reference").glob("*.md"))
    for name in ("options", "metrics", "codes"):
        assert f"<!-- {name}:begin -->\n{docs_site.MADE[name]()}\n<!-- {name}:end -->" in pages, name


def test_without_mkdocs_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"mkdocs and material not found in .*: pip install 'mkdocs-material"):
        docs_site.main()


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-32B", "Qwen3-235B-A22B"])
def test_the_page_on_memory_says_what_the_code_counts(name: str) -> None:
    spec, target = SpecConfig.parse({}), TargetInfo(name, FAMILIES[name], "bfloat16", "cuda", max_num_seqs=256)
    method = built_in_method(spec, target)
    assert method is not None and method.draft is not None and isinstance(method.draft.config, DraftConfig)
    draft, held = method.draft.config, spec.buffer_mb << 20
    counted = training_memory(
        draft, TRAIN_TOKENS["cuda"], TrainSettings.first_steps, 2, False, on_card=True, documents=held
    )
    gib = [f"{size / 2**30:.1f} GiB" for size in (2 * draft.parameters, kept_logits(spec, target))]
    gib += [f"{size / 2**30:.1f} GiB" for size in (counted.weights, counted.weights + counted.slices, counted.peak)]
    cache = 2 * 2 * draft.num_kv_heads * draft.head_dim // 1024  # keys and values of one layer, in bfloat16
    cells = (name, f"{draft.parameters / 1e6:.0f}M", gib[0], f"{cache} KiB a token", *gib[1:])
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs" / "guides" / "memory.md").read_text()
