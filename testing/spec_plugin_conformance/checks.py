"""The contract: one check each, over shared runs of the adapter's real trainer.

A check's first line is what the reader of a report sees. Each takes ``runs`` and fails with the problems it found.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from inspect import isfunction

import pytest
import torch

from spec_plugin_conformance import engines, judge, omissions, reported, unchanged, versions
from spec_plugin_conformance.forward import judge_packs
from spec_plugin_conformance.runs import REFUSED, SAVED, KitRuns

_SHOWN = 8
Check = Callable[[KitRuns], None]


def _fail_if(problems: Sequence[str]) -> None:
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        pytest.fail("\n".join([*problems[:_SHOWN], *more]), pytrace=False)


def activated_by_the_documented_flag(runs: KitRuns) -> None:
    """The flag alone builds a speculating engine, and its metrics reach the trainer's log."""
    run = runs.finished("main")
    _fail_if(judge.activated(run.trace, run.metrics, runs.prefix))


def off_is_off(runs: KitRuns) -> None:
    """Without the flag nothing of the adapter is imported, recorded or logged."""
    run = runs.finished("off")
    driver = runs.driver
    if not driver.adapter_modules or not driver.trainer_modules:
        pytest.fail(
            "set adapter_modules and trainer_modules in the driver: importing these must not import those",
            pytrace=False,
        )
    code = (
        "import importlib, sys\n"
        f"sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        f"for name in {driver.trainer_modules!r}: importlib.import_module(name)\n"
        f"print('imported:', *[n for n in {driver.adapter_modules!r} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"the driver's trainer_modules cannot be imported:\n{done.stderr[-2000:]}", pytrace=False)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("imported:")]
    _fail_if(judge.off(run.trace, run.metrics, line.split()[1:]))


def hooks_fire_in_order(runs: KitRuns) -> None:
    """The hooks fire in lifecycle order, and none is missing in any step."""
    how = runs.harvests, runs.remembers, runs.driver.asynchronous
    trace = runs.finished("main").trace
    problems = judge.order(trace, *how)
    if not runs.driver.asynchronous:  # whose steps overlap
        problems += omissions.budgets_opened(trace)
    _fail_if(problems)


def policy_versions_agree(runs: KitRuns) -> None:
    """Actor, engine and every sampled sequence, or token of it, agree on the policy version, which grows by one."""
    trace, asynchronous = runs.finished("main").trace, runs.driver.asynchronous
    problems = versions.policy_versions(trace, asynchronous)
    if asynchronous:  # recorded rollouts may not lag
        faults = None if versions.lagging(trace) else runs.run("faults")
        problems += versions.lags(trace) if faults is None else versions.lags(faults.trace, faults.tour)
    _fail_if(problems)


def installed_draft_is_the_published_one(runs: KitRuns) -> None:
    """Each engine holds, bit for bit, the draft that was published last."""
    runs.needs_draft()
    _fail_if(judge.installed_draft(runs.finished("main").trace))


def target_is_untouched_by_a_refresh(runs: KitRuns) -> None:
    """A refresh changes no weight of the target."""
    runs.needs_draft()
    _fail_if(judge.target_untouched(runs.finished("main").trace))


def target_arrives_before_the_draft(runs: KitRuns) -> None:
    """New target weights are complete in the engine before the draft comes, and no request runs before both are."""
    _fail_if(judge.target_first(runs.finished("main").trace))


def weights_arrive_as_they_are(runs: KitRuns) -> None:
    """The engine computes with the weights that the actor has, to the last bit, and announces those to the draft."""
    _fail_if(reported.weights_arrived(runs.finished("main").trace, runs.has_draft))


def every_weight_arrives(runs: KitRuns) -> None:
    """Each row of each weight of a checkpoint is one that the engine rolled out with."""
    run = runs.finished("main")
    policy = runs.driver.weights(run.settings, SAVED)
    if policy is None:
        pytest.skip(f"{REFUSED}the checkpoint holds the weights sharded, or in other shapes than the engine")
    if engines.in_parts(run.trace):
        pytest.skip(f"{REFUSED}the engine's ranks shard the rows of its weights")
    _fail_if(engines.weights_arrived(run.trace, policy))


def policy_is_bitwise_equal(runs: KitRuns) -> None:
    """On the same rollouts the policy trains to the same bits with and without the flag."""
    problems = _other_bits(runs, "main")  # the run that recorded the rollouts
    # a trainer that orders recorded rollouts in another way than fresh ones gets a second run on the recorded ones
    _fail_if(problems and _other_bits(runs, "on"))


def _other_bits(runs: KitRuns, name: str) -> list[str]:
    on, off = runs.finished(name), runs.finished("off")
    problems = judge.target_first(on.trace)  # equal because nothing trained would prove nothing
    if not judge.events_of(on.trace, "spec_train_draft"):
        problems.append("the draft was not trained in the run with the flag, so equal weights prove nothing")
    with_flag, without = (runs.driver.policy(run.settings, SAVED) for run in (on, off))
    if with_flag.keys() != without.keys() or not without:
        problems.append(
            f"only one of both checkpoints has {sorted(with_flag.keys() ^ without.keys())[:4] or 'tensors'}"
        )
    for tensor in sorted(with_flag.keys() & without.keys()):
        if not _same_bits(with_flag[tensor], without[tensor]):
            problems.append(f"{tensor} differs between the checkpoints with and without the flag")
    return problems


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def random_streams_are_untouched(runs: KitRuns) -> None:
    """The trainer draws the random numbers that it would draw without the flag."""
    states = []
    for name in ("main", "off"):
        state = runs.driver.random_state(runs.finished(name).settings, SAVED)
        if state is None:
            pytest.skip(f"{REFUSED}the trainer's checkpoints hold no random state")
        states.append(state)
    _fail_if(reported.random_streams(*states))


def told_facts_are_the_engines(runs: KitRuns) -> None:
    """``TargetInfo`` says of engine, sampling and actor what the running engine, its requests and the actor show."""
    trace = runs.finished("main").trace
    _fail_if(reported.engine_facts(trace) + reported.trainer_facts(trace, runs.driver.asynchronous))


def the_flag_changes_nothing_else(runs: KitRuns) -> None:
    """Options of the engine, prompts and their number, and what is asked for them are those of a run without the flag."""
    flag, plain = runs.finished("main").trace, runs.finished("plain").trace
    problems = unchanged.options_changed(flag, plain)
    if not runs.driver.asynchronous:  # whose phases begin before the last one has ended
        problems += unchanged.requests_changed(flag, plain)
    _fail_if(problems)


def requests_are_the_trainers(runs: KitRuns) -> None:
    """Each request asks for the lengths, the stops and the sampling that the trainer's configuration says, and no more."""
    if not runs.driver.requests:
        pytest.fail(
            "set requests in the driver: the sampling options that the trainer asks for without the flag",
            pytrace=False,
        )
    _fail_if(engines.requests_as_configured(runs.finished("main").trace, runs.driver.requests))


def requests_run_at_once(runs: KitRuns) -> None:
    """As many requests are in flight as the trainer sends, not one after the other."""
    _fail_if(engines.ran_concurrently(runs.finished("main").trace, runs.driver.asynchronous))


def phases_are_timed_as_they_ran(runs: KitRuns) -> None:
    """The seconds of a phase are those with requests in flight, each on the clock of its engine."""
    _fail_if(engines.phase_seconds(runs.finished("main").trace, runs.driver.asynchronous))


def every_engine_is_told(runs: KitRuns) -> None:
    """``start_phase``, ``set_schedule`` and ``state`` reach every engine that samples, in each phase."""
    _fail_if(engines.every_engine_informed(runs.finished("main").trace))


def token_counts_are_the_engines(runs: KitRuns) -> None:
    """The tokens of a phase are those that the engine sampled in it."""
    trace = runs.finished("main").trace
    _fail_if((reported.tokens_counted_asynchronous if runs.driver.asynchronous else reported.tokens_counted)(trace))


def samples_are_the_targets(runs: KitRuns) -> None:
    """The statistical self-test passed on the trainer's own engines, each of them, before the first rollout."""
    trace = runs.finished("main").trace
    _fail_if(judge.samples(trace) + omissions.engines_tested(trace))


def failed_self_test_stops_the_run(runs: KitRuns) -> None:
    """An engine that fails its self-test stops the run before the first rollout."""
    run = runs.run("refused")
    _fail_if(reported.self_test_stopped(run.trace, run.failure))


def wrong_options_stop_the_run(runs: KitRuns) -> None:
    """An option that the plugin refuses stops the run before it samples; it does not go on without the flag."""
    run = runs.run("misconfigured")
    _fail_if(engines.options_refused(run.metrics, run.failure, run.trace))


def logprobs_come_from_the_engine(runs: KitRuns) -> None:
    """Every rollout log-prob that the guards see is one that the engine reported, and none is kept from them."""
    trace = runs.finished("main").trace
    problems = reported.logprobs_from_engine(trace)
    if not runs.driver.asynchronous:  # whose responses may be of several requests
        problems += omissions.responses_checked(trace, runs.driver.dropped(runs.finished("main").settings))
    _fail_if(problems)


def logprobs_are_checked_before_they_are_used(runs: KitRuns) -> None:
    """No update of the policy comes before the check of its log-probs, with drafts or without."""
    problems = reported.checked_before_update(runs.finished("main").trace)
    _fail_if(problems or reported.checked_before_update(runs.run("faults").trace))


def speculation_is_told_as_it_was(runs: KitRuns) -> None:
    """Batches, and tokens of the control group, are reported as drafted or plain as they were sampled."""
    problems = reported.drafted_batches_reported(runs.finished("main").trace, runs.driver.asynchronous)
    if not problems and not runs.driver.asynchronous:  # whose batches are of several phases
        faults = runs.run("faults")
        problems = reported.undrafted_batches_reported(faults.trace, faults.tour)
        problems += omissions.undrafted_tokens_reported(runs.finished("main").trace)
    _fail_if(problems)


def planted_errors_reach_the_guard(runs: KitRuns) -> None:
    """A wrong log-prob and a wrong policy version, planted in the engine, are refused by the guard."""
    driver = runs.driver
    if not driver.asynchronous and not driver.engine_version:
        pytest.fail(
            "set engine_version in the driver: without it no wrong policy version can be planted", pytrace=False
        )
    _fail_if(reported.planted_errors_refused(runs.run("faults").tour, driver.asynchronous))


def logprobs_are_the_targets(runs: KitRuns) -> None:
    """Every step's log-probs are confirmed by the recomputation, and planted errors are caught."""
    _fail_if(judge.logprobs(runs.finished("main").trace))


def violations_stop_the_run(runs: KitRuns) -> None:
    """A log-prob that is not the target's stops the run, with the reason."""
    run = runs.run("faults")
    _fail_if(judge.stopped(run.tour, run.failure, run.trace))


def hidden_states_equal_a_plain_forward(runs: KitRuns) -> None:
    """Harvested hidden states are those of a plain forward pass, token by token, and go on to be the policy's."""
    runs.needs_draft()
    run = runs.finished("main")
    packs = [pack for pack in run.packs if pack.policy_version == 0]
    if not packs:
        pytest.fail("no hidden states of policy version 0 were harvested", pytrace=False)
    configured = judge.events_of(run.trace, "spec_configure")[0]
    sampled = judge.sequences(run.trace)
    layers, dtypes = configured["aux_layers"], [configured["actor_dtype"]]
    problems = judge_packs(packs, runs.driver.target, layers, dtypes, sampled)
    problems += judge.response_lengths([pack.masks(sampled) for pack in packs], run.trace)
    _fail_if(problems + reported.states_of_the_policy(run.trace))


def draft_learns(runs: KitRuns) -> None:
    """The draft's version grows, its loss falls, and the engine refuses no refresh."""
    runs.needs_draft()
    run = runs.finished("main")
    _fail_if(judge.learns(run.trace, run.metrics, runs.prefix))


def save_kill_resume(runs: KitRuns) -> None:
    """After kill and resume the draft goes on, bit for bit, from the trainer's checkpoint, and so do the policy's versions."""
    if not runs.remembers:
        runs.needs_draft()
    run = runs.run("faults")
    resumed, main = judge.recalled if runs.remembers else judge.resumed, runs.finished("main").trace
    problems = resumed(main, run.trace) + versions.resumed(main, run.trace)
    _fail_if([*problems, f"the resumed run stopped: {run.failure}"] if problems and run.failure else problems)


def faults_leave_the_run_alive(runs: KitRuns) -> None:
    """Each hook that raises turns speculation off, training goes on plain, and comes back when healed."""
    _fail_if(judge.faults(runs.run("faults").tour))


def metrics_are_named_and_in_range(runs: KitRuns) -> None:
    """Every spec/ metric that the trainer logs is in the schema and within its bounds."""
    _fail_if(judge.metric_values(runs.finished("main").metrics, runs.prefix))


def all_metrics_reach_the_log(runs: KitRuns) -> None:
    """Whatever the session hands out as metrics is in the trainer's log, and with its own step."""
    run = runs.finished("main")
    problems = reported.metrics_logged(run.trace, run.metrics, runs.prefix)
    if not runs.driver.asynchronous:  # which may log an update when the next one is over
        problems += omissions.metrics_a_step_late(run.trace, run.metrics, runs.prefix)
    _fail_if(problems)


#: every public function of this module, in the order in which they stand here and run: none can be forgotten
CHECKS: tuple[Check, ...] = tuple(
    function
    for name, function in list(globals().items())
    if isfunction(function) and function.__module__ == __name__ and not name.startswith("_")
)
