"""What the flag may not change: the engine's options, and the requests of the first phase, against a run without it.

Pure functions from two traces to problems, as in ``judge``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from spec_plugin_conformance.judge import Event, Trace, at_least
from spec_plugin_conformance.reported import rollout_requests

#: options that differ with drafts, and why; of all others none may
OURS: Mapping[str, str] = {
    "cache.kv_cache_max_concurrency": "the draft's own cache takes some of the memory",
    "cache.kv_cache_size_tokens": "the same",
    "cache.num_gpu_blocks": "the same",
    "model.logprobs_mode": "stated log-probs are those of the law that is sampled, as a proof needs them",
    "parallel.worker_extension_cls": "how the draft is refreshed",
    "scheduler.max_num_scheduled_tokens": "vLLM sets it where drafts take places in a batch",
    "scheduler.scheduler_cls": "how k follows the batch",
}
#: parts of a configuration that are about speed alone
_SPEED = ("compilation.", "observability.", "kernel.")


def options_changed(flag: Trace, plain: Trace) -> list[str]:
    """Each option of the engines is as without the flag, but for ``OURS``."""
    (with_flag, first), (without, second) = map(_options, (flag, plain))
    problems = first + second
    for name in sorted(with_flag.keys() & without.keys() - OURS.keys()):
        if with_flag[name] != without[name] and not name.startswith(_SPEED) and not name.endswith("_port"):
            problems.append(f"the engine has {name}={with_flag[name]}, without the flag {without[name]}")
    return problems


def _options(trace: Trace) -> tuple[Mapping[str, str], list[str]]:
    found = [e["options"] for e in trace if e["hook"] == "engine_configured"]
    return (found[0] if found else {}), at_least(found, 1, "engines whose options were seen")


def requests_changed(flag: Trace, plain: Trace) -> list[str]:
    """The first phase has the same prompts, each as often and with the same options, as without the flag.

    What goes on from an answer, a further turn of a conversation, is as random as that, and not compared.

    Args:
        flag: of a synchronous run; its first phase is compared.
        plain: of a run of one step without the flag.
    """
    ends = [e["time"] for e in flag if e["hook"] == "spec_rollout_end"]
    first = [e for e in rollout_requests(flag) if ends and e["began"] < ends[0]]
    without = _until_quiet(rollout_requests(plain), len(first))
    here, there = (Counter(map(_asked, _first_turns(requests))) for requests in (first, without))
    problems = at_least(sorted(there), 1, "requests of a run without the flag")
    if problems or here == there:
        return problems
    lost, new = there - here, here - there
    shown = [
        f"{sum(found.values())} {what}, such as {next(iter(found))}"
        for what, found in (("are missing", lost), ("are there beside them", new))
        if found
    ]
    return [f"of the {sum(there.values())} requests without the flag {'; '.join(shown)}"]


def _until_quiet(requests: Sequence[Event], least: int) -> list[Event]:
    """Requests until none was under way and so many had begun: OpenRLHF asks for the next rollout before it counts steps."""
    ordered, ended = sorted(requests, key=lambda e: float(e["began"])), 0.0
    for i, e in enumerate(ordered):
        if i >= max(1, least) and e["began"] > ended:
            return ordered[:i]
        ended = max(ended, e["time"])
    return ordered


def _first_turns(requests: Sequence[Event]) -> list[Event]:
    """Requests whose prompts do not begin with the prompt and the answer of another one."""
    answered = {tuple(ids) for e in requests for ids in e.get("sequences", ()) if len(ids) > e["prompt"]}
    lengths = sorted(set(map(len, answered)))
    found = []
    for e in requests:
        prompt = e["sequences"][0][: e["prompt"]] if e.get("sequences") else []
        if not any(tuple(prompt[:n]) in answered for n in lengths if n <= len(prompt)):
            found.append(e)
    return found


def _asked(request: Event) -> str:
    said = request.get("sequences")
    return json.dumps([said[0][: request["prompt"]] if said else [], request["asked"]], sort_keys=True)
