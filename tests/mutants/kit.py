"""Mistakes in the conformance kit, which would then let an adapter's mistake pass; and in what commands read of others' files."""

from __future__ import annotations

from mutants.mutation import Mutation

_OMISSIONS, _REPORTED, _RECORDER, _WATCH, _JUDGE = (
    f"testing/spec_plugin_conformance/{name}.py" for name in ("omissions", "reported", "recorder", "watch", "judge")
)
_ENGINES, _CHECKS = "testing/spec_plugin_conformance/engines.py", "testing/spec_plugin_conformance/checks.py"
_READ, _EVIDENCE = "spec_plugin/commands/report/read.py", "projection/spec_plugin_projection/evidence.py"
_LENGTHS = "projection/spec_plugin_projection/lengths.py"

MUTATIONS = (
    Mutation(
        _RECORDER,
        "\nwatch_sessions()\n",
        "\n",
        "in a run, whose sessions import the recorder, nothing of what the trainer is handed and of harvests is written down",
        ("test_plugin.py::test_a_session_is_watched_also_where_its_own_plugins_bring_the_recorder",),
    ),
    Mutation(
        "testing/spec_plugin_conformance/faults.py",
        "if self._is_late(str(error)):",
        "if False:",
        "an asynchronous run is stopped by what the kit itself has planted, phases after the guard refused it",
        ("test_recorder_and_faults.py",),
    ),
    Mutation(
        _ENGINES,
        'e["asked"].keys() | configured.keys()',
        "configured.keys()",
        "law 2: requests with an option that the trainer has not set pass the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        "if most < max(2, _TOGETHER * len(intervals)):",
        "if most < 1:",
        "an adapter that lets requests through one by one passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        "if too_long or too_short:",
        "if too_short:",
        "law 7: a reward that is timed as sampling passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        "if missing := len(serving - begun.keys()):",
        "if missing := 0:",
        "an engine that nobody tells of a phase passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        "if silent := len(serving - shown.get(version, set())):",
        "if silent := 0:",
        "law 5: an engine that never shows its draft passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        'coarse = tensor.dtype == torch.bfloat16 and engine == "float32"',
        "tensor, coarse = tensor.bfloat16(), True",
        "law 4: weights that were rounded on the way pass the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _ENGINES,
        "if metrics or rollout_requests(trace):",
        "if metrics:",
        "a run that samples with an option that is refused passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _CHECKS,
        "return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))",
        "return torch.allclose(a, b)",
        "law 4: the kit takes nearly equal policies for equal ones",
        ("test_engines.py",),
    ),
    Mutation(
        _OMISSIONS,
        "if opened > 1:",
        "if opened > 9:",
        "a harvest with a budget for each micro-batch passes the kit",
        ("test_engines.py",),
    ),
    Mutation(
        _REPORTED,
        'elif what == NAN and "not finite" not in found[0]["why"]:',
        'elif what == NAN and "" not in found[0]["why"]:',
        "law 3: an adapter that makes a NaN a number passes the kit",
        ("test_reported.py",),
    ),
    Mutation(
        _OMISSIONS,
        "if row in answers:\n        return False",
        "if True:\n        return False",
        "law 3: a mask that leaves a token of each response out passes the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        "if seen < sampled:",
        "if seen < 0:",
        "law 3: an adapter that shows the guard half of a batch passes the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        "if rows and 2 * len(cut) > len(rows):",
        "if cut:",
        "a trainer that cuts one long response fails the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        'any(not e["rollout"] or (e.get("rollout_in_loss") and not all_stated) for e in events)',
        "False",
        "a trainer that skips its log-prob pass fails the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        'engine = e["pid"], e.get("engine", 0)',
        'engine = e["pid"], 0',
        "law 2: an engine that nobody has tested passes the kit, where another one was",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        "not all(now) and all(before)",
        "all(before)",
        "metrics that stand still fail the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _OMISSIONS,
        "if reported > 2 * asked + _FEW:",
        "if reported > 2.0:",
        "law 3: an adapter that says of every token that it is plain passes the kit",
        ("test_omissions.py",),
    ),
    Mutation(
        _REPORTED,
        '" recomputed log-probs are not finite" in found[0]["why"]',
        "False",
        "law 3: an adapter that compares the engine with itself passes the kit",
        ("test_recorder_and_faults.py",),
    ),
    Mutation(
        _RECORDER,
        "if self._digest(tensor) != was]",
        "if tensor is None]",
        "an adapter that announces the policy's own head, not a copy, passes the kit",
        ("test_watch.py",),
    ),
    Mutation(
        _WATCH,
        'return _numbers.setdefault(id(getattr(engine, "vllm_config", engine)), len(_numbers))',
        "return 0",
        "law 2: several engines of one process are taken for one",
        ("test_watch.py",),
    ),
    Mutation(
        _JUDGE,
        'if e["admitted"]:',
        "if False:",
        "an engine that samples while weights and draft come in passes the kit",
        ("test_judge.py",),
    ),
    Mutation(
        _READ,
        "if abs(step) > MOST_STEPS:\n                raise",
        "if False:\n                raise",
        "a log with a time for a step fills the memory of whoever reports on it",
        ("test_bad_runs.py",),
    ),
    Mutation(
        _READ,
        "except (ValueError, TypeError, OverflowError, RecursionError):",
        "except (ValueError, TypeError):",
        "a line of brackets ends a report in a traceback",
        ("test_bad_runs.py",),
    ),
    Mutation(
        _EVIDENCE,
        "except OverflowError:",
        "except ZeroDivisionError:",
        "a number beyond any float ends a projection in a traceback",
        ("test_bad_runs.py",),
    ),
    Mutation(
        _LENGTHS,
        "all(0 <= p <= 100 and 1 <= length <= MOST_TOKENS for p, length in known)",
        "all(1 <= length <= MOST_TOKENS for _, length in known)",
        "a projection is made of percentiles that are none",
        ("test_bad_runs.py",),
    ),
)
