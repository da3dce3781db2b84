"""The loop with several engines in its own process, whose vLLM counts drafts for all of them in one number."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter.adapter import MinimalAdapter
from spec_plugin.adapter import LocalLink, RolloutStats, merge_stats


class PairLink(LocalLink):
    """Every engine is refreshed, tested and scheduled alike, as by any link."""

    async def stats(self, policy_version: int) -> RolloutStats:
        """What vLLM counts of drafts is one number for a process: that of the engine that started last."""
        *others, last = await self.call_all("spec_stats", policy_version)
        none = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_per_pos": ()}
        return merge_stats([*(replace(part, **none) for part in others), last])


class PairAdapter(MinimalAdapter):
    """With as many engines as the settings say."""

    link_type = PairLink
