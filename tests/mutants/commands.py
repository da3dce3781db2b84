"""Mistakes in what a person reads: the report of a run, and the projection to other machines."""

from __future__ import annotations

from mutants.mutation import Mutation

_PLACES, _READ, _COMPARE, _FINDINGS, _CHANGES, _STATES, _PANELS, _FIGURES, _PAGE, _BUILD = (
    f"spec_plugin/commands/report/{name}.py"
    for name in ("places", "read", "compare", "findings", "changes", "states", "panels", "figures", "page", "build")
)
_CONTROLLER = "spec_plugin/builtin/break_even/controller.py"
_COMMAND = "spec_plugin/commands/project/command.py"
_PROJECTING, _LENGTHS, _SHAPES, _ROLLOUT = (
    f"spec_plugin/projection/{name}.py" for name in ("projecting", "lengths", "shapes", "rollout")
)

MUTATIONS = (
    Mutation(
        "spec_plugin/manager.py",
        "                refuse_code(Path(config.draft))\n",
        "                pass\n",
        "law 8: a draft's code runs under the policy's trust_remote_code",
        ("test_law8_drafts_bring_no_code.py",),
    ),
    Mutation(
        "draft_training/files.py",
        "        name: without_code(value) if isinstance(value, Mapping) else value\n",
        "        name: value\n",
        "law 8: code that a part of a draft's config.json names is not seen",
        ("test_law8_drafts_bring_no_code.py",),
    ),
    Mutation(
        "draft_training/small_lm.py",
        "for name, value in without_code(hf).items()",
        "for name, value in hf.items()",
        "law 8: what is served names code",
        ("test_law8_drafts_bring_no_code.py",),
    ),
    Mutation(
        "spec_plugin/session.py",
        "        if refused is not None:\n            raise refused\n",
        "",
        "law 3: a plugin around the guard swallows what it has refused",
        ("test_guard_insists.py",),
    ),
    Mutation(
        "spec_plugin/session.py",
        "False, trouble_in(where)\n",
        "False, Reason.OTHER_TROUBLE\n",
        "the log does not say in what drafting failed",
        ("test_speculation.py",),
    ),
    Mutation(
        "spec_plugin/actor/control.py",
        "self.session.recovering, self._tested, self._anew = False, 0 if unsent else None, True",
        "self._tested, self._anew = 0 if unsent else None, True",
        "a run that drafts again is logged as one that recovers",
        ("test_speculation.py",),
    ),
    Mutation(
        "spec_plugin/session.py",
        "self._recovery.left is None\n        trouble",
        "self._recovery.left is not None\n        trouble",
        "trouble that is tried again is logged as given up",
        ("test_speculation.py",),
    ),
    Mutation(
        "spec_plugin/speculation.py",
        "    if known or chosen == Speculation.DROPPED:",
        "    if chosen is not None:",
        "engines that draft although the controller chose not to are logged as resting",
        ("test_speculation.py",),
    ),
    Mutation(
        _CONTROLLER,
        "Speculation.DROPPED if self._dropped and not self._plan.speculates else None",
        "None",
        "a draft that was dropped within the rollout is logged as one that rests",
        ("test_speculation.py",),
    ),
    Mutation(
        "spec_plugin/outside.py",
        "            if self._left < 0:\n",
        "            if False:\n",
        "a few KiB that unpack to GiB take all of the memory",
        ("test_outside.py",),
    ),
    Mutation(
        "spec_plugin/commands/engine_limits.py",
        "if self.replicable and ranks > self.count:",
        "if ranks > self.count:",
        "check accepts a policy of 3 attention heads over 6 tensor parallel ranks, which vLLM refuses",
        ("test_engine_limits.py",),
    ),
    Mutation(
        "spec_plugin/commands/engine_limits.py",
        "return -(-self.count // self.step) * self.step % ranks == 0",
        "return self.count % ranks == 0",
        "a vocabulary that vLLM fills up is refused",
        ("test_engine_limits.py",),
    ),
    Mutation(
        "spec_plugin/commands/engine_limits.py",
        'if method is not None and method.settings.get("draft_tensor_parallel_size") != 1:',
        "if False:",
        "check accepts a draft whose heads vLLM cannot share out",
        ("test_engine_limits.py",),
    ),
    Mutation(
        "spec_plugin/commands/engine_limits.py",
        '        if kind == "yarn":\n',
        "        if False:\n",
        "check accepts sequences that are longer than a model with YaRN allows",
        ("test_engine_limits.py",),
    ),
    Mutation(
        "spec_plugin/commands/untried.py",
        "return self.run.spec.train and",
        "return",
        "a run that trains no draft is told that it would be the first to train one",
        ("test_untried.py",),
    ),
    Mutation(
        "spec_plugin/commands/untried.py",
        'if not runner.v2 and "FULL" in asked.upper():',
        "if False:",
        "a user with a GPU is promised full CUDA graphs where vLLM makes piecewise ones",
        ("test_untried.py",),
    ),
    Mutation(
        "spec_plugin/commands/terminal.py",
        'unicodedata.category(character) == "Cc"',
        "False",
        "law 8: a hostile file writes the terminal's title",
        ("test_outside.py",),
    ),
    Mutation(
        _PLACES,
        'return file.with_suffix("") if file.suffix == _PACKED else file',
        "return file",
        "a packed log is said to hold no step",
        ("test_report_read.py",),
    ),
    Mutation(
        _READ,
        "    except BROKEN as error:\n        broken.append",
        "    except EOFError as error:\n        broken.append",
        "a file that is packed in name only ends in a traceback",
        ("test_report_read.py",),
    ),
    Mutation(
        _READ,
        "return float(value) if isinstance(value, str) and value.lower() in _NO_NUMBERS else None",
        "return None",
        "a metric that a logger writes as the word NaN is passed over in silence",
        ("test_report_read.py",),
    ),
    Mutation(
        _COMPARE,
        "if hidden and name in _HIDDEN:",
        'if hidden and name == "ms_per_token":',
        "what training hides of generation is called a speed-up of hundreds",
        ("test_report_findings.py",),
    ),
    Mutation(
        _FINDINGS,
        'yield RunFinding("fine" if few else "warn", text',
        'yield RunFinding("warn", text',
        "nearly every second healthy run is warned of",
        ("test_report_findings.py", "test_report_alarms.py"),
    ),
    Mutation(
        _FINDINGS,
        "few = len(slow) < _OFTEN * len(realised.values) and min(realised.values) >= _FAR_SLOWER",
        "few = True",
        "drafting that loses is no warning",
        ("test_report_findings.py",),
    ),
    Mutation(
        _STATES,
        '    if state == "failed":\n        for_good',
        '    if state == "failed" and not run.notices:\n        for_good',
        "the report finds what has failed by what stands in the console log",
        ("test_report_findings.py",),
    ),
    Mutation(
        _STATES,
        'return _STATES.get(logged, "off")',
        'return "on" if values.get("spec/on") else "off"',
        "trouble that the run has logged is no finding of the report",
        ("test_report_findings.py",),
    ),
    Mutation(
        _FINDINGS,
        "elif span.reason in (Reason.PAIRS_SLOWER.name, Reason.ROLLOUTS_SLOWER.name):",
        "elif False:",
        "law 7: that whole rollouts were slower with drafts is found nowhere but in the console log",
        ("test_report_findings.py",),
    ),
    Mutation(
        _CHANGES,
        "least_change = _NOISES * max(noise, usual)",
        "least_change = _NOISES * noise",
        "an acceptance that wanders is a series of falls",
        ("test_report_alarms.py",),
    ),
    Mutation(
        _PANELS,
        "[s for s in ks.steps if s not in failed]",
        "ks.steps",
        "drafts are shown in steps at which speculation had failed",
        ("test_report_shown.py::test_after_a_failure_nothing_is_shown_as_drafted",),
    ),
    Mutation(
        _FIGURES,
        "        if len(series.steps) > POINTS:\n",
        "        if len(series.steps) > 100 * POINTS:\n",
        "the page of a long run is megabytes of noise",
        ("test_report_shown.py::test_long_runs_are_read_and_drawn_in_seconds_on_a_page_that_a_browser_takes",),
    ),
    Mutation(
        _PAGE,
        'rewarded if metric == "reward"',
        'run.numbers[-5:] if metric == "reward"',
        "rewards of different steps stand side by side",
        ("test_report_shown.py::test_rewards_side_by_side_are_those_of_the_same_steps",),
    ),
    Mutation(
        _BUILD,
        '        "schema": SCHEMA,\n',
        "",
        "the JSON does not say what its keys mean",
        ("test_report_shown.py::test_the_keys_of_the_json_are_those_that_the_documents_promise",),
    ),
    Mutation(
        "spec_plugin/commands/terminal.py",
        "    exit_code = 2\n",
        "    exit_code = 1\n",
        "a question that cannot be looks like a run that failed",
        ("test_projection_command.py",),
    ),
    Mutation(
        _LENGTHS,
        "if len(known) < 2 or not whole or tokens != sorted(tokens):",
        "if len(known) < 2 or tokens != sorted(tokens):",
        "a length that is no number ends in a traceback",
        ("test_projection_command.py",),
    ),
    Mutation(
        _PROJECTING,
        "        if d.model.heads % d.tp:\n",
        "        if False:\n",
        "an engine is projected that vLLM does not start",
        ("test_projection.py", "test_projection_command.py"),
    ),
    Mutation(
        _PROJECTING,
        "    if room < question.prompt + question.lengths.longest:\n",
        "    if False:\n",
        "responses are projected that no KV cache holds",
        ("test_projection_command.py",),
    ),
    Mutation(
        _PROJECTING,
        "max(_FEWEST_DRAWS, DRAWS * _FREE_RESPONSES // self.responses)",
        "DRAWS",
        "a large batch takes minutes to project",
        ("test_projection.py",),
    ),
    Mutation(
        _SHAPES,
        '(not kinds or "sliding_attention" in kinds)',
        "True",
        "a model is said to have windows that it does not use",
        ("test_projection.py",),
    ),
    Mutation(
        _ROLLOUT,
        "while waiting and len(running) < self._rollout.seats:",
        "while waiting:",
        "a batch that the KV cache has no room for runs at once",
        ("test_projection.py",),
    ),
)
