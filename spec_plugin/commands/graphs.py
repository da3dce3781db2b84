"""Which of vLLM's model runners and CUDA graphs an engine gets, in words; for ``spec-plugin check`` and the doctor."""

from __future__ import annotations

from spec_plugin.plan.model_runner import METHODS, Cluster, Runner

#: of a vLLM that takes V1 and piecewise graphs only since k changes (the bench's NOTEBOOK.md): what no controller can give back
SLOWER_PLAIN = (
    "without the flag it would be V2 with full graphs: on an H100 steps without drafts took 1.04 to 1.6 times as long with the "
    "flag (8B, batch 1 to 128), which drafts have to earn, too; a vLLM whose V2 runner changes k (0.25 and later) may spare it"
)
#: of V2, on which k may change: what is known of it on a GPU
UNTRIED_ON_V2 = (
    "never run with the flag on a GPU: on an H100 the engine of vLLM 0.26 did not start, and its repair is untried"
)
#: CUDA graphs by whether the runner is V2
_KINDS = {True: "full and piecewise", False: "piecewise"}
#: what of a run nobody has tried on a GPU, by the device type of the engine
NEVER_RUN = {
    "cpu": "judged for vLLM's CPU build, on which spec-plugin is tested; --card H100 --vllm 0.26 says it for those",
    "cuda": "no run of a trainer with the flag, and more: docs/supported.md#never-run-on-a-gpu is the list",
}


def graphs_of(runner: Runner, cluster: Cluster) -> str:
    """Which CUDA graphs an engine gets; ``enforce_eager`` and ``cudagraph_mode`` of the run's own are not looked at.

    Args:
        runner: vLLM's model runner that it gets.
        cluster: where it runs.
    """
    if cluster.device_type == "cpu":
        return "none (vLLM's CPU build)"
    if runner.refused:
        return "none: vLLM will refuse to start"
    graphs = f"{_KINDS[runner.v2]}, where the run asks for no fewer"
    if runner.v2:
        return f"{graphs}; {UNTRIED_ON_V2}"
    more = "" if cluster.changes_k_on_v2 else f"; {SLOWER_PLAIN}"
    return f"{graphs} (vLLM's own choice on V1, since k changes while it runs){more}"


def runners_by_method(cluster: Cluster) -> str:
    """Model runner and CUDA graphs of each method, where nothing was asked of vLLM; for the doctor.

    Args:
        cluster: where the engines run.
    """
    by_runner: dict[str, list[str]] = {}
    for name, settings in METHODS.items():
        runner = cluster.runner_of(settings)
        graphs = "" if runner.refused or cluster.device_type == "cpu" else f", with {_KINDS[runner.v2]} CUDA graphs"
        by_runner.setdefault(f"{runner.words}{graphs}", []).append(name)
    return "; ".join(f"{runner} ({', '.join(names)})" for runner, names in by_runner.items())
