"""What a trace must look like: pure functions from recorded events to problems, so that each can be tested in milliseconds.

A trace is the list of dicts that ``journal.read_trace`` returns; a problem is one sentence; no problems, no objection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spec_plugin_conformance.faults import HARMLESS, TOUR
from spec_plugin_conformance.metrics import describe
from spec_plugin_conformance.plants import PLANTED

Event = Mapping[str, Any]
Trace = Sequence[Event]

#: which hook may follow which, in the session of an actor; metrics and save are judged apart
_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "spec_configure": ("spec_method", "spec_load", "spec_weight_sync"),
    "spec_method": ("spec_load", "spec_weight_sync"),
    "spec_load": ("spec_load", "spec_method", "spec_weight_sync"),
    "spec_weight_sync": ("spec_draft_weights",),
    "spec_draft_weights": ("spec_refreshed", "spec_weight_sync", "spec_engine_ready", "memory_recall", "spec_schedule"),
    "spec_refreshed": ("spec_weight_sync", "spec_load", "spec_engine_ready", "memory_recall", "spec_schedule"),
    "spec_engine_ready": ("memory_recall", "spec_schedule"),
    "memory_recall": ("spec_schedule",),
    "spec_schedule": ("spec_engine_ready", "spec_schedule", "spec_rollout_start"),
    "spec_rollout_start": ("spec_rollout_end",),
    "spec_rollout_end": ("memory_keep", "spec_target_forward", "spec_check_logprobs"),
    "memory_keep": ("spec_target_forward", "spec_check_logprobs"),
    "spec_target_forward": ("spec_target_forward", "spec_check_logprobs", "spec_train_draft"),
    "spec_check_logprobs": ("spec_target_forward", "spec_check_logprobs", "spec_train_draft"),
    "spec_train_draft": ("spec_weight_sync",),
}
#: and where phases overlap with training, which then last from one weight sync to the next
_OVERLAPPING: Mapping[str, tuple[str, ...]] = {
    "spec_rollout_start": ("spec_target_forward", "spec_check_logprobs"),
    "spec_train_draft": ("spec_rollout_end", "spec_target_forward", "spec_check_logprobs"),
    "spec_rollout_end": ("spec_weight_sync",),
    "memory_keep": ("spec_weight_sync",),
}
#: how the names begin of what a session calls: its plugins' hooks, its method's memory, and who audits it
_SESSIONS = ("spec_", "memory_", "audit")
#: hooks that are judged apart, or by others
_ANYWHERE = ("spec_metrics", "spec_save", "spec_recover")
#: a hook that may come where another may
_ALIKE = {"spec_check_stated": "spec_check_logprobs"}
#: characters of the reason why a run stopped, its last ones
_SHOWN = 400
_CAUGHT = ("nan recomputed", "nan rollout", "another model", "the next token", "stale versions")


def actor_events(trace: Trace, watched: bool = False) -> list[Event]:
    """The events of the actor's session: the one that rolls out; of several data-parallel ranks the busiest.

    Args:
        trace: of the run.
        watched: also what was seen there of trainer and engine, beside its hooks.
    """
    sessions = Counter(e["session"] for e in trace if e["hook"].startswith("spec_"))
    rolling = {e["session"] for e in trace if e["hook"] == "spec_rollout_start"}
    if not rolling:
        return []
    busiest = max(rolling, key=lambda s: sessions[s])
    found = (e for e in trace if e["session"] == busiest and (watched or e["hook"].startswith(_SESSIONS)))
    return sorted(found, key=lambda e: e["event"])


def events_of(trace: Trace, *hooks: str) -> list[Event]:
    """The events of these hooks in the actor's session."""
    return [e for e in actor_events(trace, watched=True) if e["hook"] in hooks]


def audits(trace: Trace, *moments: str) -> list[Event]:
    """The ``audit`` events at these moments: "synced", "refreshed", "rollout"."""
    return [e for e in events_of(trace, "audit") if e["moment"] in moments]


def at_least(found: Sequence[object], count: int, what: str) -> list[str]:
    """A problem if fewer than ``count`` were found; ``what`` is their plural."""
    return [] if len(found) >= count else [f"{len(found)} {what} were recorded, expected {count} or more"]


def activated(trace: Trace, metrics: Mapping[int, Mapping[str, float]], prefix: str) -> list[str]:
    """The flag builds a speculating engine, starts a session in the actor, drafts, and reaches the trainer's log."""
    problems = at_least(trace, 1, "events")
    if not any(e["hook"] == "spec_method" for e in trace):
        problems.append(
            "no process asked the method for its engine settings (spec_method): the engine was built without a draft"
        )
    if not actor_events(trace):
        problems.append("no process fired spec_rollout_start: no session runs in the actor")
    elif not any(e["drafts"] for e in events_of(trace, "spec_rollout_end")):
        problems.append("nothing was drafted in any rollout, although serve=always")
    if silent := [step for step, found in metrics.items() if f"{prefix}spec/failed" not in found]:
        problems.append(f"steps {silent} logged no {prefix}spec/failed; they logged {sorted(metrics[silent[0]])[:8]}")
    if broken := [step for step, found in metrics.items() if found.get(f"{prefix}spec/failed")]:
        why = next((e["failure"] for e in events_of(trace, "spec_metrics") if e["failure"]), "no reason recorded")
        problems.append(f"speculation had failed in steps {broken}: {why}")
    return problems


def off(trace: Trace, metrics: Mapping[int, Mapping[str, float]], imported: Sequence[str]) -> list[str]:
    """Without the flag no session, no metric and no module of the adapter exists."""
    problems = [f"{len(trace)} hook calls were recorded without the flag"] if trace else []
    names = sorted({n for found in metrics.values() for n in found if "spec/" in n})
    if names:
        problems.append(f"metrics {names} were logged without the flag")
    if imported:
        problems.append(f"importing the trainer imports {', '.join(imported)}")
    return problems


def order(trace: Trace, harvests: bool = True, remembers: bool = False, asynchronous: bool = False) -> list[str]:
    """The hooks of the actor's session come in lifecycle order, and none is missing in any step.

    Args:
        trace: of the run.
        harvests: the method reads hidden states.
        remembers: the method drafts from rollouts.
        asynchronous: phases may overlap with training.
    """
    events = [e for e in actor_events(trace) if e["hook"] != "audit"]
    if not events:
        return ["no session fired spec_rollout_start"]
    problems = [] if events[0]["hook"] == "spec_configure" else [f"{events[0]['hook']} came before spec_configure"]
    line = [_ALIKE.get(str(e["hook"]), str(e["hook"])) for e in events if e["hook"] not in _ANYWHERE]
    for before, after in pairwise(line):
        may = _FOLLOWS[before] + (_OVERLAPPING.get(before, ()) if asynchronous else ())
        if after not in may:
            problems.append(f"{after} came after {before}; expected {' or '.join(may)}")
    needed = ["spec_check_logprobs", "spec_train_draft", "spec_weight_sync"]
    needed += ["spec_target_forward"] * harvests + ["memory_keep"] * remembers
    return problems + _each_step(events, needed, asynchronous)


def _each_step(events: Trace, all_needed: Sequence[str], asynchronous: bool) -> list[str]:
    """From one rollout to the next: log-probs checked before the draft trains, states harvested, metrics asked once."""
    problems = []
    starts = [i for i, e in enumerate(events) if e["hook"] == "spec_rollout_start"]
    for begin, end in pairwise(starts):
        hooks = [e["hook"] for e in events[begin:end]]
        step = f"in the step of policy version {events[begin]['policy_version']}"
        for needed in all_needed:
            if needed not in hooks:
                problems.append(f"{step} {needed} is missing")
        asked = hooks.count("spec_metrics")
        if asked != 1 and not (asynchronous and asked):  # which may update more than once between two syncs
            problems.append(f"{step} spec_metrics was fired {asked} times, expected once")
        # before the phase ended, a save still belongs to the step before: some trainers save after their weight sync
        late = hooks[_index(hooks, "spec_rollout_end") : _index(hooks, "spec_train_draft")]
        early = [h for h in late if h in ("spec_metrics", "spec_save")]
        if early:
            problems.append(f"{step} {early[0]} came before spec_train_draft: it misses this step's draft training")
    return problems


def _index(hooks: Sequence[str], hook: str) -> int:
    return hooks.index(hook) if hook in hooks else 0


def installed_draft(trace: Trace) -> list[str]:
    """Each engine holds exactly the draft that was published last, after the refresh and when it rolls out."""
    problems: list[str] = []
    published: list[Any] | None = None
    rank = {e["session"] for e in actor_events(trace)}
    for e in (e for e in trace if e["session"] in rank or e["hook"] == "engine_state"):
        if e["hook"] == "spec_draft_weights" and e["published"]:
            published = e["published"]
        elif e["hook"] == "spec_refreshed" and not e["installed"]:
            problems.append(f"the engine refused draft {e['sent_version']}: {e['reason']}")
        elif e["hook"] in ("audit", "engine_state") and e["moment"] in ("refreshed", "rollout") and published:
            held = [e["draft_version"], e["draft_digest"]]
            if held != published:
                problems.append(
                    f"{e['moment']}: the engine holds draft {_short(held)}, published was {_short(published)}"
                )
    return problems + at_least(audits(trace, "refreshed"), 2, "engine states after a refresh")


def _short(draft: Sequence[Any]) -> str:
    return f"{draft[0]} ({str(draft[1])[:12]}…)"


def target_untouched(trace: Trace) -> list[str]:
    """A refresh leaves every weight of the target as it was."""
    problems: list[str] = []
    synced: Event | None = None
    pairs = 0
    for e in audits(trace, "synced", "refreshed"):
        if e["moment"] == "synced":
            synced = e
        elif synced is not None:
            pairs += 1
            if e["target_digest"] != synced["target_digest"]:
                problems.append(f"the refresh to draft {e['draft_version']} changed the target's weights")
    return problems if pairs >= 2 else [*problems, f"{pairs} refreshes were seen between two engine states, expected 2"]


def target_first(trace: Trace) -> list[str]:
    """Each weight sync brings new target weights, and they are there before the draft comes, and no request before both."""
    problems: list[str] = []
    synced: Event | None = None
    syncs = 0
    for e in audits(trace, "synced", "refreshed", "rollout"):
        if e["admitted"]:
            problems.append(
                f"{e['admitted']} requests were in flight while policy version {e['policy_version']} was replaced ({e['moment']})"
            )
        if e["moment"] == "refreshed":
            continue
        if e["moment"] == "synced":
            if synced is not None and e["target_digest"] == synced["target_digest"]:
                problems.append(f"weight sync {syncs} changed no weight of the engine's target")
            synced, syncs = e, syncs + 1
        elif synced is not None and e["target_digest"] != synced["target_digest"]:
            problems.append(
                f"policy version {e['policy_version']} rolls out with other target weights than the weight sync brought"
            )
    return problems if syncs >= 2 else [*problems, f"{syncs} weight syncs were seen, expected 2 or more"]


def samples(trace: Trace) -> list[str]:
    """The self-test ran on the trainer's engine before the first rollout, and passed."""
    events = events_of(trace, "spec_engine_ready", "spec_rollout_start")
    ready = [e for e in events if e["hook"] == "spec_engine_ready"]
    problems = [f"{c['name']}: {c['detail']}" for e in ready for c in e["checks"] if not c["passed"]]
    if not ready or not ready[0]["checks"]:
        problems.append("the self-test never reported: spec_engine_ready was not fired, or without checks")
    elif events[0]["hook"] != "spec_engine_ready":
        problems.append("the first rollout came before the self-test")
    return problems


def logprobs(trace: Trace) -> list[str]:
    """In each step the guards saw the rollout's log-probs, and a fresh guard catches every planted error in them."""
    problems = []
    checked = events_of(trace, "spec_check_logprobs")
    confirmed = {e["policy_version"] for e in checked if e["rollout"]}
    for e in checked:
        step = f"policy version {e['policy_version']}"
        if not e["rollout"]:
            if e["policy_version"] in confirmed:
                continue  # its rollout's log-probs were kept from the trainer, and came by themselves
            problems.append(f"{step}: no log-probs of the rollout to compare with")
            continue
        if not sum(e["response_lengths"]):
            problems.append(f"{step}: the mask of the response tokens is empty")
        if e["caught"]["unchanged"]:
            problems.append(f"{step}: a fresh provenance guard refuses the batch as it is")
        problems += [
            f"{step}: a fresh provenance guard misses {name!r}" for name in _CAUGHT if not e["caught"].get(name)
        ]
    rolled = {
        e["policy_version"] for e in events_of(trace, "spec_train_draft", "spec_rollout_end") if "policy_version" in e
    }
    unseen = sorted(rolled - {e["policy_version"] for e in checked} - {max(rolled, default=-1)})
    if unseen:
        problems.append(f"rollouts of policy versions {unseen} were never checked")
    return problems + at_least(checked, 1, "log-prob checks")


def stopped(tour: Trace, failure: str | None, trace: Trace) -> list[str]:
    """After the planted violation the run stops, says why, and never rolls out again."""
    planted = [e for e in tour if e["event"] == "violation"]
    if not planted:
        why = "" if failure is None else f": it stopped before, {failure[-_SHOWN:]}"
        return [f"the run ended before the violation was planted{why}"]
    problems = []
    if failure is None:
        problems.append("the run went on to its end, although the guard had raised")
    elif PLANTED not in failure and "LogprobProvenanceError" not in failure:
        problems.append(f"the run stopped without naming LogprobProvenanceError: {failure[-_SHOWN:]}")
    version = planted[0]["policy_version"]
    later = [e["policy_version"] for e in events_of(trace, "spec_rollout_start") if e["policy_version"] > version]
    if later:
        problems.append(f"policy versions {later} rolled out after the violation at {version}")
    updates = [e for e in trace if e["hook"] == "policy_update"]
    if any(u["pid"] == e.get("pid") and u["time"] > e["time"] for u in updates for e in planted):
        problems.append("the policy was updated after the guard had raised, with the log-probs that it refused")
    if len(planted) > 1:
        problems.append(
            f"log-probs were checked {len(planted)} times after the violation, expected a stop at the first"
        )
    return problems


def faults(tour: Trace) -> list[str]:
    """Each broken hook is followed by a phase that generates and drafts nothing, then by training, then by drafts again.

    Behind one of ``HARMLESS`` drafts go on.
    """
    problems = []
    stops = next((e["stops"] for e in tour if e["event"] == "begins"), TOUR)
    for hook in (*stops, *(["spec_save"] if any(e.get("hook") == "spec_save" for e in tour) else [])):
        broken = next((i for i, e in enumerate(tour) if e["event"] == "broken" and e["hook"] == hook), None)
        if broken is None:
            problems.append(f"{hook} was never reached, so no fault in it was tested")
            continue
        plain = next((i for i, e in enumerate(tour) if i > broken and e["event"] == "plain"), None)
        if plain is None:
            problems.append(f"{hook}: no rollout came after the fault")
            continue
        problems += _phase_behind(hook, tour[plain])
        later = [e for e in tour[plain + 1 :] if e["event"] == "drafting"]
        if not later:
            problems.append(f"{hook}: nothing was drafted after it was healed")
        elif later[0]["policy_version"] <= tour[plain]["policy_version"]:
            problems.append(f"{hook}: the policy did not move on from version {tour[plain]['policy_version']}")
    return problems


def _phase_behind(hook: str, phase: Event) -> list[str]:
    problems = []
    if hook in HARMLESS:
        if not phase["drafts"] or phase["why"] != "None":
            problems.append(f"{hook}: its failure, which is to cost a warning, has turned drafts off: {phase['why']}")
        return problems
    if phase["drafts"]:
        problems.append(
            f"{hook}: {phase['drafts']} verification steps in the phase after the fault, expected plain decoding"
        )
    if not phase["tokens"]:
        problems.append(f"{hook}: no token was generated after the fault")
    if PLANTED not in phase["why"]:
        problems.append(f"{hook}: the session failed for another reason: {phase['why']}")
    return problems


def learns(trace: Trace, metrics: Mapping[int, Mapping[str, float]], prefix: str) -> list[str]:
    """The draft's version grows with the refreshes, its loss falls, and the engine refuses none."""
    versions = [e["draft_version"] for e in events_of(trace, "spec_refreshed") if e["installed"]]
    problems = at_least(versions, 3, "installed refreshes")
    if any(b <= a for a, b in pairwise(versions)):
        problems.append(f"draft versions in the engine are {versions}, expected growth")
    losses = [m[f"{prefix}spec/draft_loss"] for _, m in sorted(metrics.items()) if f"{prefix}spec/draft_loss" in m]
    if len(losses) < 2:
        problems.append(f"{len(losses)} steps logged a draft loss, expected 2 or more")
    elif losses[-1] >= losses[0]:
        problems.append(f"the draft's loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    refused = max((m.get(f"{prefix}spec/refresh_refused", 0.0) for m in metrics.values()), default=0.0)
    return problems if not refused else [*problems, f"the engine refused {refused:g} refreshes"]


def resumed(first: Trace, second: Trace) -> list[str]:
    """After kill and resume, the first draft that is published is one that the first run published or saved, bit for bit.

    An asynchronous run may be killed between the two.
    """
    problems = []
    if not events_of(first, "spec_save"):
        problems.append("spec_save was never fired before the kill")
    if not [e for e in second if e["hook"] == "spec_load" and e["found"]]:
        problems.append("spec_load never got a folder that exists")
    saved = (e.get("saved") for e in events_of(first, "spec_save"))
    then = {e["published"][0]: e["published"][1] for e in events_of(first, "spec_draft_weights") if e["published"]}
    then = {version: digest for version, digest in filter(None, saved)} | then if then else then
    now = [e["published"] for e in events_of(second, "spec_draft_weights") if e["published"]]
    if not then or not now:
        return [*problems, "one of the runs published no draft"]
    version, digest = now[0]
    if version not in then:
        problems.append(f"the resumed run publishes draft {version} first, the killed one had published {sorted(then)}")
    elif version == min(then):
        problems.append(f"the resumed run starts with draft {version}, as untrained as the first run's")
    elif then[version] != digest:
        problems.append(f"draft {version} has other weights after resuming")
    return problems


def recalled(first: Trace, second: Trace) -> list[str]:
    """After kill and resume the method recalls, before the first rollout, the rollouts that the first run saved."""
    if not sum(e["rollouts"] for e in events_of(first, "memory_keep")):
        return ["the method's memory was given no rollout before the kill (memory_keep)"]
    recalls = [e for e in events_of(second, "memory_recall", "spec_rollout_start") if e["hook"] == "memory_recall"]
    problems = [] if events_of(first, "spec_save") else ["spec_save was never fired before the kill"]
    if not recalls:
        return [*problems, "the resumed run never recalled the saved rollouts"]
    return problems if recalls[0]["rollouts"] else [*problems, "the resumed run recalled no rollout"]


def metric_values(metrics: Mapping[int, Mapping[str, float]], prefix: str) -> list[str]:
    """Every ``spec/`` metric is in the schema and within its bounds."""
    problems, seen = [], 0
    for step, found in sorted(metrics.items()):
        for name, value in found.items():
            if "spec/" not in name:
                continue
            seen += 1
            if not name.startswith(f"{prefix}spec/"):
                problems.append(f"step {step}: {name} does not begin with {prefix}spec/")
                continue
            metric = describe(name.removeprefix(prefix))
            if metric is None:
                problems.append(f"step {step}: {name} is not in the schema")
            elif not metric.low <= value <= metric.high:
                problems.append(
                    f"step {step}: {name} = {value:g} {metric.unit}, allowed {metric.low:g} to {metric.high:g}"
                )
    return problems if seen else ["no spec/ metric was logged"]


def cut_rows(trace: Trace) -> set[tuple[float, ...]]:
    """The log-probs by the engine of each row from which a trainer cut tokens on purpose (``Responses.cut``)."""
    return {tuple(row) for e in trace if e["hook"] == "rows_cut" for row in e["rows"]}


def sequences(trace: Trace) -> list[list[int]]:
    """Token ids of all that the engines sampled for the trainer, each with its prompt."""
    return [ids for e in trace if e["hook"] == "engine_request" for ids in e.get("sequences", ())]


def response_lengths(packs: Sequence[Mapping[str, Any]], trace: Trace) -> list[str]:
    """The loss mask of each harvested document covers exactly its sampled tokens.

    They lie at its end, or, in a conversation, wherever an engine has answered to what stands before.

    Args:
        packs: ``policy_version``, and ``masks`` with one list of bools per document, whose token ids ``documents`` has.
        trace: of the same run; the log-prob masks say how many tokens each response has.
    """
    problems = []
    answers = [(e["prompt"], ids) for e in trace if e["hook"] == "engine_request" for ids in e.get("sequences", ())]
    for pack in packs:
        version = pack["policy_version"]
        batches = [
            e for e in trace if e["hook"] == "spec_check_logprobs" and e["policy_version"] == version
        ]  # all ranks'
        known = {n for e in batches for n in e["response_lengths"]}
        for i, mask in enumerate(pack["masks"]):
            marked = sum(mask)
            if batches and marked not in known:
                problems.append(f"version {version} document {i}: {marked} tokens marked, no response has that many")
            at_the_end = mask == [False] * (len(mask) - marked) + [True] * marked and marked < len(mask)
            if not at_the_end and mask != _sampled_of(pack["documents"][i], answers):
                problems.append(
                    f"version {version} document {i}: the marked tokens are not the end of the document, nor what an engine "
                    "has answered in it"
                )
    return problems


def _sampled_of(document: list[int], answers: Sequence[tuple[int, Sequence[int]]]) -> list[bool]:
    """Which tokens of a document an engine has sampled: (tokens of its prompt, token ids of both) of each answer.

    A trainer may have cut the last answer's end.
    """
    found = [False] * len(document)
    for first, ids in answers:
        until = min(len(ids), len(document))
        if first < until and document[:until] == list(ids[:until]):
            found[first:until] = [True] * (until - first)
    return found
