"""Law 3, judged: the provenance guard."""

from spec_plugin.builtin.provenance.guard import ProvenanceGuard, by_lag

__all__ = ["ProvenanceGuard", "by_lag"]
