"""The contract: one check each, over shared runs of the adapter's real trainer.

A check's first line is what the reader of a report sees. Each takes ``evidence`` and fails with the problems it found.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch

from spec_plugin.conformance import complete, engines, judge, told, versions
from spec_plugin.conformance.evidence import REFUSED, SAVED, Evidence
from spec_plugin.conformance.forward import judge_packs

_SHOWN = 8
Check = Callable[[Evidence], None]


def _judge(problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        pytest.fail("\n".join([*problems[:_SHOWN], *more]), pytrace=False)


def activated_by_the_documented_flag(evidence: Evidence) -> None:
    """The flag alone builds a speculating engine, and its metrics reach the trainer's log."""
    run = evidence.finished("main")
    _judge(judge.activated(run.trace, run.metrics, evidence.prefix))


def off_is_off(evidence: Evidence) -> None:
    """Without the flag nothing of the adapter is imported, recorded or logged."""
    run = evidence.finished("off")
    driver = evidence.driver
    if not driver.adapter_modules or not driver.trainer_modules:
        pytest.fail("the driver names no adapter_modules or no trainer_modules, so nothing can be shown", pytrace=False)
    code = (
        "import importlib, sys\n"
        f"sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        f"for name in {driver.trainer_modules!r}: importlib.import_module(name)\n"
        f"print('imported:', *[n for n in {driver.adapter_modules!r} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"trainer_modules cannot be imported:\n{done.stderr[-2000:]}", pytrace=False)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("imported:")]
    _judge(judge.off(run.trace, run.metrics, line.split()[1:]))


def hooks_fire_in_order(evidence: Evidence) -> None:
    """The hooks fire in lifecycle order, and none is missing in any step."""
    how = evidence.harvests, evidence.remembers, evidence.driver.asynchronous
    trace = evidence.finished("main").trace
    problems = judge.order(trace, *how)
    if not evidence.driver.asynchronous:  # whose steps overlap
        problems += complete.budgets_opened(trace)
    _judge(problems)


def policy_versions_agree(evidence: Evidence) -> None:
    """Actor, engine and every sampled sequence, or token of it, agree on the policy version, which grows by one."""
    trace, asynchronous = evidence.finished("main").trace, evidence.driver.asynchronous
    problems = versions.policy_versions(trace, asynchronous)
    if asynchronous:  # recorded rollouts may not lag
        faults = None if versions.lagging(trace) else evidence.run("faults")
        problems += versions.lags(trace) if faults is None else versions.lags(faults.trace, faults.tour)
    _judge(problems)


def installed_draft_is_the_published_one(evidence: Evidence) -> None:
    """Each engine holds, bit for bit, the draft that was published last."""
    evidence.needs_draft()
    _judge(judge.installed_draft(evidence.finished("main").trace))


def target_is_untouched_by_a_refresh(evidence: Evidence) -> None:
    """A refresh changes no weight of the target."""
    evidence.needs_draft()
    _judge(judge.target_untouched(evidence.finished("main").trace))


def target_arrives_before_the_draft(evidence: Evidence) -> None:
    """New target weights are complete in the engine before the draft comes, and no request runs before both are."""
    _judge(judge.target_first(evidence.finished("main").trace))


def weights_arrive_as_they_are(evidence: Evidence) -> None:
    """The engine computes with the weights that the actor has, to the last bit, and the draft is told of those."""
    _judge(told.weights_arrived(evidence.finished("main").trace))


def every_weight_arrives(evidence: Evidence) -> None:
    """Each row of each weight of a checkpoint is one that the engine rolled out with."""
    run = evidence.finished("main")
    policy = evidence.driver.weights(run.settings, SAVED)
    if policy is None:
        pytest.skip(f"{REFUSED}the checkpoint has the weights in parts, or in other shapes than the engine")
    if engines.in_parts(run.trace):
        pytest.skip(f"{REFUSED}each rank of the engine has a part of each row")
    _judge(engines.weights_arrived(run.trace, policy))


def policy_is_bitwise_equal(evidence: Evidence) -> None:
    """On the same rollouts the policy trains to the same bits with and without the flag."""
    problems = _other_bits(evidence, "main")  # the run that recorded the rollouts
    # a trainer that orders recorded rollouts in another way than fresh ones gets a second run on the recorded ones
    _judge(problems and _other_bits(evidence, "on"))


def _other_bits(evidence: Evidence, name: str) -> list[str]:
    on, off = evidence.finished(name), evidence.finished("off")
    problems = judge.target_first(on.trace)  # equal because nothing trained would prove nothing
    if not judge.of(on.trace, "spec_train_draft"):
        problems.append("the draft was not trained in the run with the flag")
    with_flag, without = (evidence.driver.policy(run.settings, SAVED) for run in (on, off))
    if with_flag.keys() != without.keys() or not without:
        problems.append(f"other tensors: {sorted(with_flag.keys() ^ without.keys())[:4] or 'none at all'}")
    for tensor in sorted(with_flag.keys() & without.keys()):
        if not _same_bits(with_flag[tensor], without[tensor]):
            problems.append(f"{tensor} differs")
    return problems


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def random_streams_are_untouched(evidence: Evidence) -> None:
    """The trainer draws the random numbers that it would draw without the flag."""
    states = []
    for name in ("main", "off"):
        state = evidence.driver.random_state(evidence.finished(name).settings, SAVED)
        if state is None:
            pytest.skip(f"{REFUSED}the trainer's checkpoints hold no random state")
        states.append(state)
    _judge(told.random_streams(*states))


def told_facts_are_the_engines(evidence: Evidence) -> None:
    """What the adapter says of engine, sampling and actor is what these say of themselves."""
    trace = evidence.finished("main").trace
    _judge(told.engine_facts(trace) + told.trainers_facts(trace, evidence.driver.asynchronous))


def requests_are_the_trainers(evidence: Evidence) -> None:
    """Each request asks for the lengths, the stops and the sampling that the trainer's configuration says, and no more."""
    if not evidence.driver.requests:
        pytest.fail("the driver names no requests: what the trainer asks of vLLM without the flag", pytrace=False)
    _judge(engines.asked_as_configured(evidence.finished("main").trace, evidence.driver.requests))


def requests_run_at_once(evidence: Evidence) -> None:
    """As many requests are in flight as the trainer sends, not one after the other."""
    _judge(engines.at_once(evidence.finished("main").trace, evidence.driver.asynchronous))


def phases_are_timed_as_they_ran(evidence: Evidence) -> None:
    """The seconds of a phase are those with requests in flight, each on the clock of its engine."""
    _judge(engines.timed_as_it_ran(evidence.finished("main").trace, evidence.driver.asynchronous))


def every_engine_is_told(evidence: Evidence) -> None:
    """Each engine that samples is told of each phase, drafts by the table that the others have, and shows its draft."""
    _judge(engines.all_told(evidence.finished("main").trace))


def token_counts_are_the_engines(evidence: Evidence) -> None:
    """The tokens of a phase are those that the engine sampled in it."""
    trace = evidence.finished("main").trace
    _judge((told.all_tokens_counted if evidence.driver.asynchronous else told.tokens_counted)(trace))


def samples_are_the_targets(evidence: Evidence) -> None:
    """The statistical self-test passed on the trainer's own engines, each of them, before the first rollout."""
    trace = evidence.finished("main").trace
    _judge(judge.samples(trace) + complete.engines_tested(trace))


def failed_self_test_stops_the_run(evidence: Evidence) -> None:
    """An engine that fails its self-test stops the run before the first rollout."""
    run = evidence.run("refused")
    _judge(told.self_test_stopped(run.trace, run.failure))


def wrong_options_stop_the_run(evidence: Evidence) -> None:
    """An option that the plugin refuses stops the run before it samples; it does not go on without the flag."""
    run = evidence.run("misconfigured")
    _judge(engines.options_refused(run.metrics, run.failure, run.trace))


def logprobs_come_from_the_engine(evidence: Evidence) -> None:
    """Every rollout log-prob that the guards see is one that the engine reported, and none is kept from them."""
    trace = evidence.finished("main").trace
    problems = told.engines_logprobs(trace)
    if not evidence.driver.asynchronous:  # whose responses may be of several requests
        problems += complete.answers_checked(trace)
    _judge(problems)


def logprobs_are_checked_before_they_are_used(evidence: Evidence) -> None:
    """No update of the policy comes before the check of its log-probs, with drafts or without."""
    _judge(told.checked_first(evidence.finished("main").trace) or told.checked_first(evidence.run("faults").trace))


def speculation_is_told_as_it_was(evidence: Evidence) -> None:
    """Text that was drafted for is said to be, and plain text is not; nor plain tokens of a phase that drafts."""
    problems = told.drafting_told(evidence.finished("main").trace, evidence.driver.asynchronous)
    if not problems and not evidence.driver.asynchronous:  # whose batches are of several phases
        faults = evidence.run("faults")
        problems = told.plain_told(faults.trace, faults.tour)
        problems += complete.undrafted_told(evidence.finished("main").trace)
    _judge(problems)


def planted_errors_reach_the_guard(evidence: Evidence) -> None:
    """A wrong log-prob and a wrong policy version, planted in the engine, are refused by the guard."""
    driver = evidence.driver
    if not driver.asynchronous and not driver.engine_version:
        pytest.fail("the driver names no engine_version, so no policy version can be planted", pytrace=False)
    _judge(told.wrong_answers_refused(evidence.run("faults").tour, driver.asynchronous))


def logprobs_are_the_targets(evidence: Evidence) -> None:
    """Every step's log-probs are confirmed by the recomputation, and planted errors are caught."""
    _judge(judge.logprobs(evidence.finished("main").trace))


def violations_stop_the_run(evidence: Evidence) -> None:
    """A log-prob that is not the target's stops the run, with the reason."""
    run = evidence.run("faults")
    _judge(judge.stopped(run.tour, run.failure, run.trace))


def hidden_states_equal_a_plain_forward(evidence: Evidence) -> None:
    """Harvested hidden states are those of a plain forward pass, token by token, and go on to be the policy's."""
    evidence.needs_draft()
    run = evidence.finished("main")
    packs = [pack for pack in run.packs if pack.policy_version == 0]
    if not packs:
        pytest.fail("no hidden states of policy version 0 were harvested", pytrace=False)
    configured = judge.of(run.trace, "spec_configure")[0]
    problems = judge_packs(packs, evidence.driver.target, configured["aux_layers"], [configured["actor_dtype"]])
    problems += judge.response_lengths([pack.masks() for pack in packs], run.trace)
    _judge(problems + told.policys_states(run.trace))


def draft_learns(evidence: Evidence) -> None:
    """The draft's version grows, its loss falls, and the engine refuses no refresh."""
    evidence.needs_draft()
    run = evidence.finished("main")
    _judge(judge.learns(run.trace, run.metrics, evidence.prefix))


def save_kill_resume(evidence: Evidence) -> None:
    """After kill and resume the draft goes on, bit for bit, from the trainer's checkpoint."""
    if not evidence.remembers:
        evidence.needs_draft()
    run = evidence.run("faults")
    resumed = judge.recalled if evidence.remembers else judge.resumed
    problems = resumed(evidence.finished("main").trace, run.trace)
    _judge([*problems, f"the resumed run stopped: {run.failure}"] if problems and run.failure else problems)


def faults_leave_the_run_alive(evidence: Evidence) -> None:
    """Each hook that raises turns speculation off, training goes on plain, and comes back when healed."""
    _judge(judge.faults(evidence.run("faults").tour))


def metrics_are_named_and_in_range(evidence: Evidence) -> None:
    """Every spec/ metric that the trainer logs is in the schema and within its bounds."""
    _judge(judge.metric_values(evidence.finished("main").metrics, evidence.prefix))


def all_metrics_reach_the_log(evidence: Evidence) -> None:
    """Whatever the session hands out as metrics is in the trainer's log, and with its own step."""
    run = evidence.finished("main")
    problems = told.metrics_logged(run.trace, run.metrics, evidence.prefix)
    if not evidence.driver.asynchronous:  # which may log an update when the next one is over
        problems += complete.a_step_late(run.trace, run.metrics, evidence.prefix)
    _judge(problems)


#: in the order in which they run
CHECKS: tuple[Check, ...] = (
    activated_by_the_documented_flag,
    off_is_off,
    hooks_fire_in_order,
    policy_versions_agree,
    installed_draft_is_the_published_one,
    target_is_untouched_by_a_refresh,
    target_arrives_before_the_draft,
    weights_arrive_as_they_are,
    every_weight_arrives,
    policy_is_bitwise_equal,
    random_streams_are_untouched,
    told_facts_are_the_engines,
    requests_are_the_trainers,
    requests_run_at_once,
    phases_are_timed_as_they_ran,
    every_engine_is_told,
    token_counts_are_the_engines,
    samples_are_the_targets,
    failed_self_test_stops_the_run,
    wrong_options_stop_the_run,
    logprobs_come_from_the_engine,
    logprobs_are_checked_before_they_are_used,
    speculation_is_told_as_it_was,
    planted_errors_reach_the_guard,
    logprobs_are_the_targets,
    violations_stop_the_run,
    hidden_states_equal_a_plain_forward,
    draft_learns,
    save_kill_resume,
    faults_leave_the_run_alive,
    metrics_are_named_and_in_range,
    all_metrics_reach_the_log,
)
