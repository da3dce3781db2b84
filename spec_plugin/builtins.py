"""The built-in plugins; they go through the same door as everybody else's."""

from __future__ import annotations


def built_in_plugins() -> dict[str, object]:
    """Fresh instances by name, in registration order."""
    from spec_plugin.controller import BreakEvenController
    from spec_plugin.methods.eagle3 import Eagle3Method
    from spec_plugin.metrics import MetricsSink
    from spec_plugin.provenance import ProvenanceGuard
    from spec_plugin.training import DraftTraining

    return {
        "eagle3": Eagle3Method(),
        "trainer": DraftTraining(),
        "provenance": ProvenanceGuard(),
        "controller": BreakEvenController(),
        "metrics": MetricsSink(),
    }
