"""The wheels as somebody has them who installs them: built, installed without this tree in sight, and asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: each distribution's folder, a file that it must have beside its modules, and the words that a command of it prints
FOLDERS = {
    "spec_plugin": (".", "spec_plugin/commands/report/page.html.j2"),
    "spec_plugin_testing": ("testing", "spec_plugin_conformance/targets/qwen3.py"),
    "spec_plugin_projection": ("projection", "spec_plugin_projection/command.py"),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    folders = [str(ROOT / folder) for folder, _ in FOLDERS.values()]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(out), *folders]
    subprocess.run(command, check=True, capture_output=True)
    return {wheel.name.partition("-")[0]: wheel for wheel in out.glob("*.whl")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What an index would get, built as a release is, from this tree; and the ``bin`` of the tools that did it."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    tools = folder / "env" / "bin"
    done = subprocess.run([str(tools / "pip"), "install", "-q", "build", "twine"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"build and twine cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    for place, _ in FOLDERS.values():
        command = [str(tools / "python"), "-m", "build", "-q", "--outdir", str(folder / "dist"), str(ROOT / place)]
        subprocess.run(command, check=True, capture_output=True)
    return folder / "dist", tools


class Installed:
    """An environment with wheels in it, beside the libraries of this one, none of which knows this tree."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.bin, self.home = folder / "bin", folder / "home"
        self.home.mkdir()
        pip = [str(self.bin / "pip"), "install", "-q", "--no-deps", "--no-index", *map(str, wheels)]
        subprocess.run(pip, check=True, capture_output=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for library in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if "spec_plugin" not in library.name and not (site / library.name).exists():
                (site / library.name).symlink_to(library)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPEC_PLUGIN"))}
        environment = {**kept, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def plain(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("plain") / "env", [wheels["spec_plugin"]])


@pytest.fixture(scope="module")
def whole(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("whole") / "env", list(wheels.values()))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_all_of_its_packages_and_its_license(wheels: dict[str, Path], name: str) -> None:
    folder, file = FOLDERS[name]
    with zipfile.ZipFile(wheels[name]) as archive:
        held = set(archive.namelist())
    assert file in held and any(entry.endswith("licenses/LICENSE") for entry in held)
    tops = {Path(entry).parts[0] for entry in held if entry.endswith("__init__.py")}
    places = [ROOT / folder, ROOT / "adapters"] if folder == "." else [ROOT / folder]
    sources = {
        str(source.relative_to(place))
        for place in places
        for top in tops
        for source in (place / top).rglob("*.*")
        if source.suffix != ".pyc"
    }
    assert sources <= held and not any(entry.startswith(("tests", "examples")) for entry in held)


def test_an_index_would_take_what_is_built_and_show_its_readme(built: tuple[Path, Path]) -> None:
    dist, tools = built
    files = sorted(str(file) for file in dist.iterdir())
    assert len(files) == 2 * len(FOLDERS)
    checked = subprocess.run([str(tools / "twine"), "check", "--strict", *files], capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == len(files), checked.stdout


def test_the_sources_have_tests_docs_and_license(built: tuple[Path, Path]) -> None:
    (file,) = built[0].glob("spec_plugin-*.tar.gz")
    with tarfile.open(file) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "docs/guards.md", "tests/wheels/test_wheels.py", "testing/pyproject.toml", "Makefile"):
        assert name in held, name
    assert not [name for name in held if name.startswith((".envs", ".cache", "dist", "runs"))]


def test_a_config_group_of_verls_comes_with_the_wheel(plain: Installed) -> None:
    model = plain.home / "qwen3.json"
    sizes = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 8, "num_attention_heads": 2, "head_dim": 32}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    model.write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes}))
    settings = ["actor_rollout_ref.model.path=Qwen/Qwen3-8B", "actor_rollout_ref.rollout.name=vllm", "+spec=on"]
    command = ("spec-plugin", "check", "verl", "--json", "--model-config", str(model), "--", *settings, "+spec.k=5")
    checked = plain.run(*command)
    assert "up to 5 tokens" in checked.stdout and "misspelt" not in checked.stdout, checked.stdout + checked.stderr
    unknown = plain.run(*command, "+spec.kk=5")
    assert unknown.returncode == 1 and "did you mean" in unknown.stdout


def test_export_is_a_command_and_refuses_what_is_no_draft(plain: Installed) -> None:
    refused = plain.run("spec-plugin", "export", "nowhere", "--to", "sglang", "--out", "out")
    assert refused.returncode == 2 and "nowhere does not exist" in refused.stderr and not (plain.home / "out").exists()


def test_what_is_imported_is_the_wheels(whole: Installed) -> None:
    names = "spec_plugin, draft_training, spec_plugin_conformance, spec_plugin_projection"
    said = whole.run("python", "-c", f"import {names}; print(*(m.__file__ for m in ({names})))").stdout
    assert len(said.split()) == 4 and all(str(whole.bin.parent) in place for place in said.split())


def test_a_plain_install_helps_checks_and_examines(plain: Installed) -> None:
    assert "conformance" in plain.run("spec-plugin", "--help").stdout
    model = plain.home / "model.json"
    model.write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}))
    arguments = ["actor_rollout_ref.model.path=Qwen/Qwen3-8B", "actor_rollout_ref.rollout.name=sglang"]
    checked = plain.run("spec-plugin", "check", "verl", "--json", "--model-config", str(model), "--", *arguments)
    assert checked.returncode == 1 and "rollout.name" in checked.stdout, checked.stderr
    examined = json.loads(plain.run("spec-plugin", "doctor", "--json").stdout)
    said = json.dumps(examined)
    assert "spec_plugin_verl_cpu" in said and not examined["works"], "vLLM's CPU build needs spec-plugin-testing"


@pytest.mark.parametrize(("command", "folder"), [("conformance", "testing"), ("project", "projection")])
def test_a_command_of_another_wheel_says_what_to_install_and_then_is_there(
    plain: Installed, whole: Installed, command: str, folder: str
) -> None:
    refused = plain.run("spec-plugin", command, "verl")
    assert refused.returncode == 2 and f"pip install ./{folder}" in refused.stderr
    helped = whole.run("spec-plugin", command, "--help")
    assert helped.returncode == 0 and "Not installed" not in helped.stdout


def test_a_projection_and_the_names_of_the_kits_drivers(whole: Installed) -> None:
    asked = "--model Qwen3-8B --card H100 --batch 64 --acceptance 3=2.8 --json"
    assert json.loads(whole.run("spec-plugin", "project", *asked.split()).stdout)
    unknown = whole.run("spec-plugin", "conformance", "nobody")
    assert "known: openrlhf, trl, verl" in unknown.stdout + unknown.stderr
