"""The checks of this repository, in parts that can run beside each other: what each runs and what it needs, for ``check.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Some of the checks."""

    name: str
    commands: tuple[str, ...]  # in the repository's root, up to the first that fails
    gigabytes: float = 1.0  # of memory at its peak, as measured
    tags: frozenset[str] = frozenset()  # two with the same tag need a /tmp each
    daily: bool = True  # runs when nothing is named
    limit: float = 2400.0  # seconds; far above what a busy machine needs: it is there for what hangs

    @property
    def needs(self) -> list[str]:
        """Environments of ``make_env.py``, as its commands name them."""
        return re.findall(r"\.envs/([^/]+)/bin/", " ".join(self.commands))


def _pytest(environment: str, *arguments: str) -> tuple[str]:
    return (f".envs/{environment}/bin/python -m pytest {' '.join(arguments)}",)


def _trainers(environment: str, *files: str, more: str = "") -> tuple[str]:
    return _pytest(environment, *(f"tests/trainers/test_{file}.py" for file in files), f"-m trainer{more}")


def _kit(environment: str, *calls: str) -> tuple[str, ...]:
    return tuple(f".envs/{environment}/bin/spec-plugin conformance {arguments}" for arguments in calls)


def _rare(
    name: str, commands: tuple[str, ...], gigabytes: float = 5, limit: float = 2400.0, verl: bool = False
) -> Part:
    """What does not run when nothing is named."""
    return Part(name, commands, gigabytes, VERL if verl else frozenset(), False, limit)


VERL, LONG = frozenset({"verl"}), 5400.0
MINIMAL, SOAK = "tests/engine/test_conformance_minimal.py", "tests/engine/test_soak.py"
ENGINE = "-m 'engine and not family'"
LINT = (
    ".envs/verl/bin/python -m ruff check .",
    ".envs/verl/bin/python -m ruff format --check .",
    ".envs/verl/bin/python -m mypy",
    ".envs/verl/bin/lint-imports",
    ".envs/verl/bin/python tools/docs_site.py",
    "env PYTHONPATH=tests:testing .envs/verl/bin/python -m mutants.run --check",
)
#: engine tests on vLLM's V2 model runner, whose kernels run in Triton's interpreter: under asynchronous scheduling, as on a card,
#: and without
ON_V2 = {
    "v2-async": "stale_drafts refresh scheduler phase selftest methods draft_passes sleep adapters states",
    "v2": "stale_drafts refresh scheduler draft_passes",
}
#: tests for a card, without one; TRL's need its environment
REHEARSED = (("verl", "tests/gpu"), ("trl", "tests/gpu/test_gpu_trl.py"))
#: deployment shapes of the kit's drivers; all checks of one take 5 to 15 minutes
SHAPES = {
    "verl": "tp2 dp2 nodes2 lora lora-adapters packed agent mistral long colocate separate separate2 v2",
    "openrlhf": "tp2 dp2 zero3 agent job async partial",
    "trl": "skip accumulate iterations sleep rloo peft skip-peft tools environment rollouts dp2 zero3 fsdp2",
}
QUICK_SHAPES = ("tp2", "dp2", "separate")  # of verl, some minutes for all three
#: the checks of a shape that need one short run and no self-test
QUICK = '"installed or untouched or arrives or hidden or learns"'
#: of verl with other actors, in environments of their own
ACTORS = {"megatron": "megatron megatron-tp2 megatron-pp2 megatron-cp2 megatron-ep2", "veomni": "veomni"}
#: drafting methods beside the first one; the policy of shape mimo has MTP heads
METHODS = {"verl": "draft_model mtp suffix ngram", "openrlhf": "draft_model suffix", "trl": "suffix"}
#: the kit with other versions of vLLM: by its environment, of which adapter
VERSIONS = {
    "verl-vllm0.24": "verl",
    "verl-vllm0.26": "verl",
    "verl-vllm0.31": "verl",
    "openrlhf-vllm0.31": "openrlhf",
    "minimal-vllm0.32": "",
    "trl1.14": "trl",
}


def _deployments(trainer: str) -> list[Part]:
    """The kit on one trainer in each shape and with each method."""
    verl, found = trainer == "verl", []
    for shape in SHAPES[trainer].split():
        found.append(
            _rare(f"{trainer}-{shape}", _kit(trainer, f"{trainer} --shape {shape}"), 7 if verl else 5, verl=verl)
        )
    for method in METHODS[trainer].split():
        options = f"{'--shape mimo ' if method == 'mtp' else ''}--spec method={method}"
        found.append(_rare(f"{trainer}-{method.replace('_', '-')}", _kit(trainer, f"{trainer} {options}"), verl=verl))
    return found


def _version(name: str, trainer: str) -> Part:
    commands = _kit(name, trainer) if trainer else _pytest(name, f"{MINIMAL} -k keeps_the_contract")
    return _rare(name, commands, 8, verl=trainer == "verl")


def _on_v2(runner: str, names: str) -> str:
    tests = " ".join(f"tests/engine/test_{name}.py" for name in names.split())
    return f"env SPEC_PLUGIN_CPU_RUNNER={runner} {_pytest('verl', tests, ENGINE, '--durations 20')[0]}"


#: They start in this order: lint for early news, then longest first, so that the lanes end at about the same time; of verl's,
#: which need the memory, no two at once.
PARTS = (
    Part("lint", LINT),
    Part("engine", _pytest("verl", "tests/engine", ENGINE, f"--ignore {MINIMAL} --ignore {SOAK} --durations 20"), 5),
    Part("trainers-verl", _trainers("verl", "verl", "ulysses"), 9, VERL),
    Part("wrong-adapters", _pytest("verl", f"{MINIMAL} -k a_wrong_adapter -m 'not family'"), 5),
    Part("kit-verl", _kit("verl", "verl"), 8, VERL),
    Part("kit-openrlhf", _kit("openrlhf", "openrlhf"), 4),
    Part("kit-trl", _kit("trl", "trl"), 4),
    Part("trainers-trl", _trainers("trl", "trl"), 4),
    Part("unit", _pytest("verl", "tests/unit -n 2"), 3),
    Part("wheels", _pytest("verl", "tests/wheels"), 2),
    Part("trainers-openrlhf", _trainers("openrlhf", "openrlhf", "openrlhf_engine"), 3),
    Part("kit-minimal", _pytest("verl", f"{MINIMAL} -k 'keeps_the_contract or a_right_adapter' -m 'not family'"), 4),
    _rare("shapes", _kit("verl", *(f"verl --shape {shape} -k {QUICK}" for shape in QUICK_SHAPES)), 9, verl=True),
    _rare("kit-minimal-others", _pytest("verl", f"{MINIMAL} -k 'behind or two_engines'"), 4),
    _rare("only", _pytest("verl", f"{MINIMAL} -k by_no_other_check"), limit=LONG),
    _rare("families", _pytest("verl", "tests/engine -m family -k 'not by_no_other_check'")),
    _rare("engine-v2", tuple(_on_v2(*item) for item in ON_V2.items()), limit=LONG),
    _rare("gpu-rehearsal", tuple(f"env SPEC_PLUGIN_GPU_REHEARSAL=1 {_pytest(*run)[0]}" for run in REHEARSED)),
    _rare("soak", _pytest("verl", SOAK, "-m engine")),
    _rare("verl-trouble", _trainers("verl", "verl_separate"), 9, verl=True),
    _rare("verl-kills", _trainers("verl", "verl_kills", more=" -s"), 9, LONG, verl=True),
    _rare("openrlhf-kills", _trainers("openrlhf", "openrlhf_kills", more=" -s"), limit=LONG),
    _rare("megatron-layouts", _trainers("megatron", "megatron"), 4),
    *(
        _rare(f"verl-{s}", _kit(a, f"verl --shape {s}"), 7, verl=True)
        for a, shapes in ACTORS.items()
        for s in shapes.split()
    ),
    *(part for trainer in SHAPES for part in _deployments(trainer)),
    *(_version(*item) for item in VERSIONS.items()),
)
