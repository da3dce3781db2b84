"""The built-in plugins; they go through the same door as everybody else's."""

from __future__ import annotations


def built_in_methods() -> dict[str, object]:
    """Fresh drafting methods by name; they are judged without torch, whose import takes seconds."""
    from spec_plugin.methods.auto import AutoMethod
    from spec_plugin.methods.draft_model import DraftModelMethod
    from spec_plugin.methods.eagle3 import Eagle3Method
    from spec_plugin.methods.frozen import FrozenMethod
    from spec_plugin.methods.mtp import MtpMethod
    from spec_plugin.methods.ngram import NgramMethod
    from spec_plugin.methods.suffix import SuffixMethod

    methods: dict[str, object] = {
        "eagle3": Eagle3Method(),
        "draft_model": DraftModelMethod(),
        "mtp": MtpMethod(),
        "suffix": SuffixMethod(),
        "ngram": NgramMethod(),
        "frozen": FrozenMethod(),
    }
    return {**methods, "auto": AutoMethod(methods)}


def optional_packages() -> dict[str, tuple[str, str]]:
    """Distribution -> who needs it, and how to get it."""
    from spec_plugin.methods.suffix import INSTALL

    return {"arctic-inference": ("only spec.method=suffix needs it", INSTALL)}


def built_in_plugins() -> dict[str, object]:
    """Fresh instances by name, in registration order."""
    from spec_plugin.policy.break_even.controller import BreakEvenController
    from spec_plugin.policy.exactness import ExactnessGuard
    from spec_plugin.policy.metrics import MetricsSink
    from spec_plugin.policy.online_training import DraftTraining
    from spec_plugin.policy.provenance import ProvenanceGuard

    return {
        **built_in_methods(),
        "trainer": DraftTraining(),
        "exactness": ExactnessGuard(),  # the last plugin is asked first: behind the guard, which may refuse the batch
        "provenance": ProvenanceGuard(),
        "controller": BreakEvenController(),
        "metrics": MetricsSink(),
    }
