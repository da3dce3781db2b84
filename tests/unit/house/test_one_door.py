"""No adapter, no controller and no part of the engine knows a drafting method by name."""

from __future__ import annotations

import re

import pytest
from builders.paths import ROOT

from spec_plugin.lifecycle.registry import built_in_methods

#: rooms of the methods themselves; the list of them; the allow-list of what vLLM may be told; and which runner serves which
MAY_KNOW = ("methods/", "lifecycle/registry.py", "engine/lossless.py", "engine/vllm/suffix/", "plan/model_runner.py")
#: words for people: what an option or a metric means
FOR_PEOPLE = ("api/config.py", "api/hookspecs.py", "commands/export.py")


#: an option of the trainer itself is called like it
THEIRS = {
    "mtp": [
        "adapters/spec_plugin_verl_check/options.py",
    ]
}
#: a plain word: only where it stands between quotation marks is it a name
PLAIN_WORDS = ("frozen",)


@pytest.mark.parametrize("name", [n for n in built_in_methods() if n != "auto"])  # which no ``Method`` is called
def test_a_methods_name_is_known_in_its_own_room_only(name: str) -> None:
    quoted = rf"[\"']{name}[\"']" if name in PLAIN_WORDS else rf"(?<!\w)(?<!file\.){re.escape(name)}(?!\w)"
    word = re.compile(quoted, re.IGNORECASE)
    files = [*(ROOT / "adapters").rglob("*.py"), *(ROOT / "spec_plugin").rglob("*.py")]
    files = [file for file in files if "build" not in file.relative_to(ROOT).parts]  # which pip leaves behind
    assert len(files) > 100
    found = []
    for file in files:
        place = str(file.relative_to(ROOT)).removeprefix("spec_plugin/")
        if not place.startswith(MAY_KNOW) and place not in FOR_PEOPLE and word.search(file.read_text()):
            found.append(place)
    assert sorted(found) == THEIRS.get(name, [])
