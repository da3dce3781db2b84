"""The provenance guard: every log-prob that enters the loss is finite, and the target's, at the recorded version (law 3).

``exact`` refuses what is wrong for certain. How far engine and actor may differ is a matter of degree: ``reference`` keeps what
plain text of this run differs by and judges other text by it, as the table in ``rules`` says; docs/guards.md explains it, and how
often it raises a false alarm in simulated runs. Drafted text that is too far off stops the run. Text of a phase without drafts is
warned of and left out of the reference, no more: without the flag the run would be no better.
"""

from spec_plugin.policy.provenance.exact import by_lag
from spec_plugin.policy.provenance.guard import ProvenanceGuard

__all__ = ["ProvenanceGuard", "by_lag"]
