"""Mistakes in judging a draft: its length, what is whole of it, what its files may name."""

from __future__ import annotations

from mutants.mutation import Mutation

_ROPE, _FIT, _DAMAGE = (
    "draft_training/rope.py",
    "spec_plugin/methods/fit.py",
    "spec_plugin/methods/damage.py",
)

MUTATIONS = (
    Mutation(
        _ROPE,
        "_parameters",
        "layer.rope_scaling or layer.rope_parameters",
        "layer.rope_parameters or layer.rope_scaling",
        "a draft turns positions by another base than the policy, which was stretched by rope_scaling",
        ("test_derived_length.py",),
    ),
    Mutation(
        _ROPE,
        "Rope.positions_for",
        'if self.type == "yarn" else max(least,',
        'if self.type == "yarn" else min(least,',
        "the run's own draft ends before the engine's texts do, and drafting for the whole batch with it",
        ("test_draft_length.py",),
    ),
    Mutation(
        _FIT,
        "refuse_unfit",
        "and reads[1] < target.length",
        "and reads[1] < target.length and method.draft is not None",
        "a frozen draft shorter than the run is accepted without a word",
        ("test_draft_length.py",),
    ),
    Mutation(
        _FIT,
        "refuse_unfit",
        'method.settings.get("method") not in _NO_WEIGHTS',
        'method.settings.get("method") not in (*_NO_WEIGHTS, "mtp")',
        "sleep drops an MTP layer that no refresh brings back, and NaN is drafted from there on",
        ("test_draft_length.py",),
    ),
    Mutation(
        _FIT,
        "refuse_two_policies",
        "places(Path(target.path))",
        "pass",
        "actor and engine load different weights from one folder",
        ("test_draft_length.py",),
    ),
    Mutation(
        _DAMAGE,
        "refuse_damaged",
        "if (found := shapes.get(name)) != expected:",
        "if (found := shapes.get(name)) not in (expected, None):",
        "a draft without one of its tensors drafts with what was in memory",
        ("test_method_frozen.py",),
    ),
    Mutation(
        _DAMAGE,
        "refuse_damaged",
        "part.get_dtype() not in _WEIGHTS",
        "part.get_dtype() in _NO_WEIGHTS",
        "a draft of int8 is served as if it were weights",
        ("test_method_frozen.py",),
    ),
    Mutation(
        "draft_training/files.py",
        "_runs",
        '"--" in reference',
        "False",
        "law 8: code of another repository is let through",
        ("test_law8_drafts_bring_no_code.py",),
    ),
    Mutation(
        "spec_plugin/lifecycle/manager.py",
        "ask_method",
        "str(folder_without_code(Path(config.draft)))",
        "config.draft",
        "law 8: what vLLM reads still names code, and a file may come into the folder later",
        ("test_law8_drafts_bring_no_code.py",),
    ),
    Mutation(
        "draft_training/config.py",
        "_refuse_variants",
        'if "sliding_attention" in fields.layer_types and fields.sliding_window:',
        "if False:",
        "a windowed draft is trained to look further than it is served",
        ("test_draft_config.py",),
    ),
    Mutation(
        "spec_plugin/lifecycle/session.py",
        "SpecSession.save",
        'with self.guarded(Reason.CHECKPOINT, f"save of plugin {plugin} in {path}", harmless=True):',
        'with self.guarded(Reason.CHECKPOINT, "save"):',
        "law 6: one full disk costs eight plain syncs",
        ("test_session.py",),
    ),
    Mutation(
        "spec_plugin/lifecycle/plugin_metrics.py",
        "PluginMetrics.merged",
        'with self._guarded(Reason.OTHER_TROUBLE, "metrics in a wrapper\'s answer", harmless=True):',
        "if True:",
        "law 6: metrics of a wrapper that cannot be read stop the run",
        ("test_session.py",),
    ),
    Mutation(
        "spec_plugin/commands/cli.py",
        "_Commands.invoke",
        "except Exception as error:",
        "except LookupError as error:",
        "a command ends in a traceback",
        ("test_cli.py::test_whatever_a_command_raises_is_one_sentence_and_exit_code_2",),
    ),
    Mutation(
        "spec_plugin/commands/forecast.py",
        "judge",
        "            method = _method(run)\n",
        "            method = built_in_method(run.spec, run.target)\n",
        "check knows no plugin's method",
        ("test_check_command.py",),
    ),
)
