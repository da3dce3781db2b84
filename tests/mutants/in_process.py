"""Mistakes where engine and trainer share a process: a synchronous ``LLM``, an engine in each rank, and TRL's adapter."""

from __future__ import annotations

from mutants.mutation import Mutation

_RANKS, _ENGINE = "spec_plugin/actor/rank_engines.py", "spec_plugin/engine/inprocess.py"
_FLAG, _OPTIONS, _TRAINER = (f"adapters/spec_plugin_trl/{name}.py" for name in ("flag", "options", "trainer"))

MUTATIONS = (
    Mutation(
        _RANKS,
        "(refresh.draft_version, refresh.digest) != wanted",
        "False",
        "law 5: a rank installs another draft than the first one's",
        ("test_rank_engines.py::test_a_rank_with_another_draft_refuses_it_and_no_engine_keeps_it",),
    ),
    Mutation(
        _RANKS,
        '        if method == "spec_settle" and not mine[0]:\n            self._serves = self._served_before\n',
        "",
        "law 5: a rank says that its engine serves a draft which it has given back",
        ("test_rank_engines.py",),
    ),
    Mutation(
        _RANKS,
        "lambda: self._draft[0] == policy_version",
        "lambda: True",
        "a rank that is still making its draft refuses it",
        ("test_rank_engines.py",),
    ),
    Mutation(
        _RANKS,
        "            if thread is None:\n                dist.broadcast_object_list([None], src=0, group=self._group)",
        "            if thread is None:\n                pass",
        "the other ranks serve for ever",
        ("test_rank_engines.py::test_a_failure_in_the_block_lets_the_other_ranks_go_on",),
    ),
    Mutation(
        _RANKS,
        "            with random_streams_kept():\n                own",
        "            if True:\n                own",
        "law 4: the engine's work moves the trainer's random streams",
        ("test_rank_engines.py::test_a_single_rank_needs_no_group_and_its_engine_draws_nothing_of_the_trainers",),
    ),
    Mutation(
        "spec_plugin/actor/control.py",
        "        if self._keep is not None:\n            self._keep(self.policy_version, refresh)\n",
        "",
        "a rank's own draft never reaches the engine in its process",
        ("test_rank_engines.py",),
    ),
    Mutation(
        _ENGINE,
        "kept = level if self._spec_front.session.config.sleep_level > 1 else min(level, 1)",
        "kept = level",
        "the engine sleeps at level 2 and comes back without its draft",
        ("test_inprocess.py",),
    ),
    Mutation(
        _ENGINE,
        "params.logprobs, params.flat_logprobs = 0, True",
        "pass",
        "law 3: a trainer that asks for no log-probs has nothing to verify",
        ("test_inprocess.py",),
    ),
    Mutation(
        _ENGINE,
        "params.extra_args = request.extra_args",
        "pass",
        "the control group is drafted for, and said not to be",
        ("test_inprocess.py",),
    ),
    Mutation(
        _ENGINE,
        "            if not finished:\n                self._engine.abort_request([request_id])",
        "            pass",
        "a request that nobody waits for runs on in the trainer's rollouts",
        ("test_inprocess.py",),
    ),
    Mutation(
        "spec_plugin/actor/harvest.py",
        "return [row[start : start + n] for row, start, n in zip(state, starts, lengths, strict=True)]",
        "return [row[:n] for row, start, n in zip(state, starts, lengths, strict=True)]",
        "rows that are padded on the left are harvested from their first column on",
        ("test_harvest.py",),
    ),
    Mutation(
        _FLAG,
        "return bool(first) and first[0].lower() in _OFF",
        "return False",
        "law 1: SPEC_PLUGIN_TRL=0 turns it on",
        ("test_trl_adapter.py",),
    ),
    Mutation(
        _OPTIONS,
        'if field("use_liger_kernel") and field("vllm_importance_sampling_correction") is False and _older_than(1, 15):',
        "if False:",
        "law 3: log-probs that the adapter never sees enter the loss",
        ("test_trl_adapter.py",),
    ),
    Mutation(
        _TRAINER,
        " and self.recomputed is None and options.recomputes(self.trainer)",
        " and self.recomputed is None",
        "law 3: TRL's reference is judged in the policy's place, and the policy's log-probs enter the loss unseen",
        ("test_trl_run.py",),
    ),
    Mutation(
        _TRAINER,
        "        if self.unchecked:\n",
        "        if False:\n",
        "law 3: a subclass of TRL's trainer trains on log-probs that nobody has checked",
        ("test_trl_run.py",),
    ),
    Mutation(
        _TRAINER,
        "        if self.rolling and step == self.synced:\n            return",
        "        if False:\n            return",
        "TRL's ranks wait for each other where only some of them have another turn",
        ("test_trl_run.py",),
    ),
    Mutation(
        _OPTIONS,
        ' or field("off_policy_mask_threshold") is not None',
        "",
        "law 3: log-probs of the engine that mask the loss are not judged as such",
        ("test_trl_run.py", "test_trl_adapter.py"),
    ),
    Mutation(
        "testing/spec_plugin_conformance/omissions.py",
        'sum(bool(e["plain"]) for e in answered) >= _CONTROLS',
        'any(e["plain"] for e in answered)',
        "the kit fails an adapter for a response whose text another one has, too",
        ("test_omissions.py",),
    ),
)
