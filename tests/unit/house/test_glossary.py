"""docs/reference/glossary.md: at most 40 terms, each once, and none that is another one's other name."""

from __future__ import annotations

import re
from collections import Counter

from builders.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()


def test_there_are_at_most_forty_terms_and_each_has_one_meaning():
    rows = re.findall(r"^\| (?!word|---)([^|]+?) \| ([^|]+?) \|$", PAGE, re.M)
    assert 30 <= len(rows) <= 40
    names = [name.strip(" )") for term, _ in rows for name in re.split(r"\(", term)]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert all(len(meaning.split()) >= 5 for _, meaning in rows)
