"""Evidence, along the run, that the engine samples from the policy (law 2), from tokens that the trainer's own pass went over.

``statistics`` has functions of a sampled token whose mean is zero under the policy's distribution; ``capital`` bets on them,
and what it holds is evidence that can be looked at whenever one likes; ``plugin`` is the plugin. docs/guards.md explains it, with
false alarms and power in simulated runs.
"""

from spec_plugin.policy.exactness.plugin import ExactnessGuard

__all__ = ["ExactnessGuard"]
