"""What a user with a GPU is told first: the CUDA graphs of a run, and what of it nobody has run yet; for ``check`` and doctor.

spec-plugin is tested with vLLM's CPU build; parts of it ran on a GPU (docs/measured.md). Whoever runs another of them there
takes its row out of ``UNTRIED``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_plugin.engine_class import keeps_states
from spec_plugin.model_runner import (
    A_TRAINED_DRAFT,
    METHODS,
    NEVER_AHEAD,
    Runner,
    runner_of,
    scheduled_ahead,
    v2_takes_every_k,
)

if TYPE_CHECKING:
    from spec_plugin.method import Method
    from spec_plugin.run_plan import RunFacts

#: of a vLLM that takes V1 and piecewise graphs only since k changes (docs/measured.md): what no controller can give back
SLOWER_PLAIN = (
    "without the flag it would be V2 with full graphs: on an H100 steps without drafts took 1.04 to 1.6 times as long with the "
    "flag (8B, batch 1 to 128), which drafts have to earn, too; a vLLM whose V2 runner changes k (0.25 and later) may spare it"
)
_INTRODUCTION = "spec-plugin was tested on CPUs, and parts of it on a GPU;"
NOTHING = "nothing: spec-plugin was tested on CPUs, with vLLM's CPU build as it is here"
#: of an engine on a GPU without enforce_eager, by whether it has the V2 model runner
_DEFAULT_GRAPHS = {
    True: "full and piecewise CUDA graphs",
    False: "piecewise CUDA graphs alone, since k changes while it runs",
}


class Untried(NamedTuple):
    """One part that has not run on a GPU."""

    what: str  # a noun phrase for a user
    where: str  # the runs that use it, see ``_uses``; empty: all


_EVERY_RUN = ""
_FULL = "on the V2 model runner, where enforce_eager is off"
_V2 = "on the V2 model runner"
_MANY_ON_V1 = "on the V1 model runner with max_num_seqs above 256"
_AHEAD = f"but for {' and '.join(NEVER_AHEAD)}, and targets with recurrent states"
_OTHER = "with another method"
_TESTED = "where spec.self_test is on"
_TRAINED = "where a draft is trained"
_STATES = "where a draft learns from hidden states"
_SLEEPS = "where the engine sleeps between rollouts"
_RANKS = "where an engine has more than one rank"

UNTRIED = (
    Untried("full CUDA graphs of drafting and of verification, for each number of drafted tokens", _FULL),
    Untried("vLLM's own GPU kernels for verification (compiled by Triton; tests interpreted them)", _V2),
    Untried(
        "verifying more than 256 requests on the V1 model runner, which needs memory that vLLM does not plan for (watch it)",
        _MANY_ON_V1,
    ),
    Untried(
        "steps that are scheduled ahead while the GPU still computes (asynchronous scheduling on real streams)", _AHEAD
    ),
    Untried("any method but a trained EAGLE-3", _OTHER),
    Untried("the engine's self-test on a GPU", _TESTED),
    Untried("how far a GPU's log-probs in bfloat16 lie from the actor's, which the checks compare", _EVERY_RUN),
    Untried("sending the policy's weights by NCCL or CUDA IPC while a draft is loaded", _EVERY_RUN),
    Untried("sending a trained draft from GPU memory into running engines, and checking it there", _TRAINED),
    Untried("keeping hidden states in a trainer's actor on a GPU (transformers alone has)", _STATES),
    Untried("sleep and wake with GPU memory really given back", _SLEEPS),
    Untried("tensor parallel ranks over NCCL", _RANKS),
    Untried("a whole run of a trainer: when to draft is measured in yours (spec.serve=auto), not known", _EVERY_RUN),
)


def _uses(run: RunFacts, method: Method | None, runner: Runner) -> Mapping[str, bool]:
    """Of each of these kinds: is this run one of it."""
    settings: Mapping[str, Any] = {} if method is None else method.settings
    trains = run.spec.train and method is not None and method.draft is not None
    reads = trains and method is not None and bool(method.harvest)
    return {
        _EVERY_RUN: True,
        _FULL: not run.eager and "FULL" in run.graphs.upper() and runner.v2,
        _V2: runner.v2,
        _MANY_ON_V1: not runner.v2 and (run.target.max_num_seqs or 257) > 256,
        _AHEAD: scheduled_ahead(settings) and not keeps_states(run.target.hf_config),
        _OTHER: not reads or settings.get("method") != A_TRAINED_DRAFT["method"],
        _TESTED: run.spec.self_test,
        _TRAINED: trains,
        _STATES: reads,
        _SLEEPS: run.sleeps,
        _RANKS: run.target.tensor_parallel > 1,
    }


def untried_in(run: RunFacts, method: Method | None, runner: Runner, device_type: str) -> str:
    """The parts that this run would be the first to use, in one line.

    Args:
        run: what its options make of it.
        method: what drafts; None: a plugin's.
        runner: vLLM's model runner that it gets.
        device_type: "cpu" or "cuda".
    """
    if device_type == "cpu":
        return NOTHING
    uses = _uses(run, method, runner)
    used = [part.what for part in UNTRIED if uses[part.where]]
    return f"{_INTRODUCTION} {len(used)} parts of this run would be used there for the first time: " + "; ".join(used)


def untried_anywhere(device_type: str) -> str:
    """All parts, each with the runs that use it; for doctor, who knows of no run."""
    if device_type == "cpu":
        return NOTHING
    return f"{_INTRODUCTION} {len(UNTRIED)} parts would be used there for the first time: " + "; ".join(
        f"{part.what} ({part.where or 'every run'})" for part in UNTRIED
    )


def graphs_of(runner: Runner, device_type: str, asked: str, eager: bool, full: bool = False) -> str:
    """Which CUDA graphs an engine gets.

    Args:
        runner: vLLM's model runner that it gets.
        device_type: "cpu" or "cuda".
        asked: vLLM's ``cudagraph_mode``, or words for it.
        eager: ``enforce_eager``.
        full: ``spec.full_graphs``.
    """
    if device_type == "cpu":
        return "none (vLLM's CPU build)"
    if eager:
        return "none (enforce_eager)"
    if runner.refused:
        return "none: vLLM will refuse to start"
    if not runner.v2 and "FULL" in asked.upper():
        if full:
            return "full where all requests have spec.k drafts, else piecewise (spec.full_graphs)"
        more = "" if v2_takes_every_k() else f"; {SLOWER_PLAIN}"
        return f"piecewise (vLLM's own choice on V1, since k changes while it runs){more}"
    return asked


def runners_by_method(device_type: str) -> str:
    """Model runner and CUDA graphs of each method, where nothing was asked of vLLM; for doctor."""
    by_runner: dict[str, list[str]] = {}
    for name, settings in METHODS.items():
        runner = runner_of(settings, device_type)
        graphs = "" if runner.refused or device_type == "cpu" else f", with {_DEFAULT_GRAPHS[runner.v2]}"
        by_runner.setdefault(f"{runner.words}{graphs}", []).append(name)
    return "; ".join(f"{runner} ({', '.join(names)})" for runner, names in by_runner.items())
