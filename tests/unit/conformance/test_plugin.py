from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from builders.fake_driver import NEEDS_A_TRAINER, Driver
from builders.paths import TESTS
from spec_plugin_conformance import plugin
from spec_plugin_conformance.checks import CHECKS
from spec_plugin_conformance.journal import read_trace
from spec_plugin_conformance.plugin import shaped

Done = subprocess.CompletedProcess[str]
NAMES = [c.__name__ for c in CHECKS]
WRITTEN = re.findall(r"^def (\w+)\(runs: KitRuns\) -> None:$", plugin.CHECKS_FILE.read_text(encoding="utf-8"), re.M)


def kit(run: Callable[..., Done], folder: Path, driver: str | None, *more: str) -> Done:
    adapter = [] if driver is None else ["--adapter", driver]
    return run(
        *("-m", "pytest", "-p", "spec_plugin_conformance", "-p", "no:cacheprovider", *adapter, *more),
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "200",
        },
    )


@pytest.fixture(scope="module")
def right(tmp_path_factory, warm_run):
    folder = tmp_path_factory.mktemp("right")
    (folder / "test_of_somebody_else.py").write_text("def test_never():\n    assert False\n")
    done = kit(
        warm_run,
        folder,
        "builders.fake_driver:Driver",
        "--kit-badge",
        "b.md",
        "--junitxml",
        "j.xml",
        "--kit-keep",
        "kept",
    )
    return done, folder


def test_without_arguments_exactly_the_checks_run_and_what_is_refused_is_reported(right):
    done, folder = right
    assert done.returncode == 0, done.stdout
    cases = {c.get("name"): c for c in ElementTree.parse(folder / "j.xml").iter("testcase")}
    assert list(cases) == NAMES == WRITTEN
    skipped = {name for name, c in cases.items() if c.find("skipped") is not None}
    assert skipped == set(NEEDS_A_TRAINER)
    assert "refused: there is no trainer | here" in cases[NEEDS_A_TRAINER[0]].find("skipped").get("message")


def test_a_folder_with_the_runs_of_another_session_is_no_place_for_these(right, warm_run):
    done = kit(warm_run, right[1], "builders.fake_driver:Driver", "--kit-keep", "kept")
    assert done.returncode == 4 and "kept is not empty: the kit keeps its runs in a new folder" in done.stderr


def test_each_run_is_started_once(right):
    launched = (right[1] / "kept" / "driver" / "launched").read_text().split()
    assert sorted(launched) == ["faults", "main", "misconfigured", "off", "plain"]


def test_the_terminal_shows_every_check_with_its_state_and_the_runs_with_their_times(right):
    out, err = right[0].stdout, right[0].stderr
    for name in NAMES:
        (line,) = [x for x in out.splitlines() if x.strip().startswith(name)]
        assert ("refused" if name in NEEDS_A_TRAINER else "supported") in line
    assert "runs: main " in out and "run faults: 3 steps" in out + err


def test_the_badge_counts_and_lists(right):
    lines = (right[1] / "b.md").read_text().splitlines()
    assert lines[0] == "**builders.fake_driver:Driver**: 27 supported, 6 refused (of 33 checks)"
    assert "| `off_is_off` | supported |" in lines
    assert "| `violations_stop_the_run` | refused: there is no trainer \\| here |" in lines


def test_a_check_that_fails_says_what_it_found(tmp_path, warm_run):
    done = kit(
        warm_run, tmp_path, "builders.fake_driver:Impure", "-k", "policy_is_bitwise_equal", "--kit-badge", "b.md"
    )
    assert done.returncode == 1
    assert "1 failed, 32 deselected" in done.stdout
    assert "`policy_is_bitwise_equal` | failed: weight differs" in (tmp_path / "b.md").read_text()


def test_what_fails_for_anothers_sake_is_known_and_once_it_passes_that_is_said(tmp_path, warm_run):
    done = kit(
        warm_run,
        tmp_path,
        "builders.fake_driver:Excused",
        "-k",
        "policy_is_bitwise_equal or off_is_off",
        "--kit-badge",
        "b.md",
    )
    badge = (tmp_path / "b.md").read_text()
    assert done.returncode == 1 and "1 failed, 31 deselected, 1 xfailed" in done.stdout
    assert "`policy_is_bitwise_equal` | known: the trainer forgets its seed" in badge
    assert "`off_is_off` | failed: [XPASS(strict)] mended long ago" in badge
    done = kit(warm_run, tmp_path, "builders.fake_driver:Excused", "-k", "policy_is_bitwise_equal")
    assert done.returncode == 0, done.stdout


def test_what_is_known_of_one_shape_is_not_known_of_another(tmp_path, warm_run):
    checks = ("-k", "policy_is_bitwise_equal or off_is_off", "--kit-shape", "elsewhere", "--kit-badge", "b.md")
    done = kit(warm_run, tmp_path, "builders.fake_driver:Excused", *checks)
    badge = (tmp_path / "b.md").read_text()
    assert done.returncode == 0, done.stdout
    assert "`policy_is_bitwise_equal` | known: its clock is wrong" in badge and "`off_is_off` | supported" in badge


def test_a_trainer_that_orders_recorded_rollouts_in_another_way_is_compared_on_recorded_ones(tmp_path, warm_run):
    done = kit(
        warm_run, tmp_path, "builders.fake_driver:Reordering", "-k", "policy_is_bitwise_equal", "--kit-keep", "kept"
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "kept" / "driver" / "launched").read_text().split() == ["main", "off", "on"]


def test_a_trainer_that_stops_fails_every_check_that_needs_it_and_says_why(tmp_path, warm_run):
    done = kit(warm_run, tmp_path, "builders.fake_driver:Broken", "-k", "hooks_fire_in_order or draft_learns")
    assert done.returncode == 1 and "2 failed" in done.stdout
    assert done.stdout.count("no GPU here") >= 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "--adapter is missing"),
        ("nobody", "no adapter named 'nobody'"),
        ("no_such_module:Driver", "cannot be imported: No module named 'no_such_module'"),
        (":", "cannot be imported: Empty module name"),
        ("..:X", "cannot be imported: "),
        ("builders.fake_driver:NEEDS_A_TRAINER", "expected a subclass of ConformanceDriver"),
    ],
)
def test_an_unknown_adapter_is_an_error_that_says_what_to_name(tmp_path, warm_run, name, said):
    done = kit(warm_run, tmp_path, name)
    assert done.returncode == 4
    assert said in done.stderr


@pytest.mark.parametrize(
    ("shapes", "said"),
    [({}, "the driver of 'mine' has no such shape; it knows none"), ({"wide": "much"}, "no such shape; wide: much")],
)
def test_an_unknown_shape_is_an_error_that_lists_the_known_ones(shapes, said):
    driver = type("Mine", (Driver,), {"shapes": shapes})
    with pytest.raises(pytest.UsageError, match=re.escape(said)):
        shaped(driver, "mine", "tall")
    assert shaped(driver, "mine", None) is driver


def test_a_family_is_handed_to_drivers_that_take_one(tmp_path):
    asked = []

    def init(self, root, shape=None, family=None):
        asked.append((root, shape, family))

    driver = type("Mine", (Driver,), {"shapes": {"wide": "much"}, "takes_families": True, "__init__": init})
    for shape, family in ((None, "qwen3_moe"), ("wide", "glm"), ("wide", None)):
        shaped(driver, "mine", shape, family)(tmp_path)
    assert asked == [(tmp_path, None, "qwen3_moe"), (tmp_path, "wide", "glm"), (tmp_path, "wide", None)]


@pytest.mark.parametrize(
    ("family", "takes", "said"), [("cobol", True, "no such family; known: "), ("glm", False, "makes its own policy")]
)
def test_a_family_that_cannot_be_had_is_an_error(family, takes, said):
    driver = type("Mine", (Driver,), {"takes_families": takes})
    with pytest.raises(pytest.UsageError, match=said):
        shaped(driver, "mine", None, family)


def test_the_kit_is_not_imported_by_the_recorder(warm_run):
    code = "import sys, spec_plugin_conformance.recorder; print('pytest' in sys.modules)"
    done = warm_run("-c", code, check=True)
    assert done.stdout.strip() == "False"


def test_a_session_is_watched_also_where_its_own_plugins_bring_the_recorder(warm_run, tmp_path):
    """As in each process of a run: nothing has imported the kit before the session makes its plugins."""
    code = (
        "import sys; from spec_plugin.api.config import SpecConfig; from spec_plugin.api.events import TargetInfo;"
        "from spec_plugin.lifecycle.session import SpecSession; assert 'spec_plugin_conformance.recorder' not in sys.modules;"
        f"plugins = ['spec_plugin_conformance.recorder:Recorder={tmp_path}'];"
        "target = TargetInfo('x', {'vocab_size': 9}, 'float32', max_num_seqs=2);"
        "SpecSession(SpecConfig.parse({'method': 'ngram', 'plugins': plugins}), target).metrics()"
    )
    warm_run("-c", code, check=True)
    assert [event["hook"] for event in read_trace(tmp_path)][-1] == "handed_metrics"


def test_options_of_the_plugin_are_read_and_judged_before_anything_runs():
    from spec_plugin_conformance.plugin import options_of

    assert options_of(["method=suffix", "k=4", "train=false"]) == {"method": "suffix", "k": 4, "train": False}
    for words, said in (
        (["k"], "expected NAME=VALUE"),
        (["metod=x"], "did you mean --spec method"),
        (["k=99"], "1 <= "),
    ):
        with pytest.raises(pytest.UsageError) as refused:
            options_of(words)
        assert said in str(refused.value) or "less than or equal" in str(refused.value)
