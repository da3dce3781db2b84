"""``+spec=on``: the flag as a config group of Hydra's, which verl's own main finds without being told where to look."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.paths import ROOT

pytest.importorskip("verl")
from omegaconf import OmegaConf
from spec_plugin_verl_check import options
from spec_plugin_verl_check.compose import ENTRIES, MAIN, REFUSALS, Entry, compose_config

PLUGIN = ROOT / "adapters" / "hydra_plugins" / "spec_plugin_verl.py"


def composed(*arguments: str, entry: Entry = MAIN) -> Any:
    return compose_config(arguments, entry)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.module)
def test_on_is_the_flag_and_options_stand_beside_it(entry: Entry) -> None:
    config = composed("+spec=on", "+spec.k=5", entry=entry)
    assert config.actor_rollout_ref.model.external_lib == "spec_plugin_verl"
    assert options.read_config(config.actor_rollout_ref.rollout).k == 5


def test_the_long_form_of_an_option_is_taken_beside_on() -> None:
    config = composed("+spec=on", "+actor_rollout_ref.rollout.custom.spec.k=4")
    assert options.read_config(config.actor_rollout_ref.rollout).k == 4


def test_an_option_that_is_set_in_both_ways_is_refused_by_hydra() -> None:
    with pytest.raises(REFUSALS, match="An item is already at"):
        composed("+spec=on", "+spec.k=5", "+actor_rollout_ref.rollout.custom.spec.k=4")


def test_off_imports_nothing_whatever_options_stand_beside_it() -> None:
    config = composed("+spec=off", "+spec.k=5")
    assert config.actor_rollout_ref.model.external_lib is None


def test_what_verl_takes_in_its_task_runner_has_no_reference_left() -> None:
    config = composed("+spec=on", "+spec.k=5")
    OmegaConf.resolve(config)  # as verl's TaskRunner does
    rollout = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref))["rollout"]  # a part, sent to a worker
    assert options.read_config(rollout).k == 5


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (["+spec=on", "+spec.k=5"], []),
        (["+spec=off", "+spec.k=5"], []),
        (["+spec.k=5"], ["+spec.k"]),
    ],
)
def test_check_knows_what_is_read_and_what_is_not(arguments: list[str], places: list[str]) -> None:
    config = composed("actor_rollout_ref.rollout.name=vllm", *arguments)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    found = [o.option for o in options.objections(rollout, model, config) if o.option.startswith("+spec.")]
    assert found == places


def test_an_unknown_member_of_the_group_is_refused_with_those_there_are() -> None:
    with pytest.raises(REFUSALS, match=r"(?s)Could not find 'spec/maybe'.*off.*on"):
        composed("+spec=maybe")


#: with the plugins of one folder alone: what is installed, or on this process's path, must not stand in for it
ALONE = "import sys, hydra_plugins; hydra_plugins.__path__ = [sys.argv.pop(1)]; "
MAINS = ALONE + "import runpy; runpy.run_module('verl.trainer.main_ppo', run_name='__main__', alter_sys=True)"
COMPOSED = ALONE + "from spec_plugin_verl_check.compose import compose_config as c; print(c(sys.argv[1:]))"


def said(folder: Path, script: str, *arguments: str) -> str:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", script, str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def with_plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "with"
    folder.mkdir()
    (folder / PLUGIN.name).write_bytes(PLUGIN.read_bytes())
    return folder


def test_law_1_without_the_group_a_configuration_is_what_it_was(tmp_path: Path, with_plugin: Path) -> None:
    plain = said(tmp_path / "bare", COMPOSED)
    assert "actor_rollout_ref" in plain and said(with_plugin, COMPOSED) == plain


@pytest.mark.slow
def test_verls_own_main_finds_the_group(with_plugin: Path) -> None:
    config = OmegaConf.create(said(with_plugin, MAINS, "--cfg", "job", "+spec=on", "+spec.k=5"))
    assert config.actor_rollout_ref.model.external_lib == "spec_plugin_verl"
    assert config.actor_rollout_ref.rollout.custom.spec.k == 5
