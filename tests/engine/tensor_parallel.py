"""A worker extension whose second rank alone fails, as the test asks."""

from __future__ import annotations

from typing import Any

from inspected import Inspected
from spec_plugin_cpu.waiting import sleep_while_waiting

from spec_plugin.engine.refresh import swap as refresh
from spec_plugin.engine.vllm import extension

sleep_while_waiting()  # each worker imports this module first


class OneRankFails(Inspected):
    """``spec_break`` until ``spec_repair``, on rank 1."""

    rank: int
    _undo: Any = None

    def spec_break(self, fault: str) -> None:
        """Break loading, checking, the read-back, or the sight of files."""
        if self.rank != 1:
            return
        owner, name, broken = {
            "check": (refresh, "check_arrived", lambda *_, **__: "no memory left"),
            "load": (self.get_draft_model(), "load_weights", self._half_loaded(self.get_draft_model().load_weights)),
            "read-back": (refresh, "mismatch", lambda *_, **__: "fc.weight differs in 3 of 9 places"),
            "another node": (extension.Path, "exists", lambda path: path.suffix != ".safetensors" and path.is_dir()),
        }[fault]
        original = getattr(owner, name)
        setattr(owner, name, broken)
        self._undo = lambda: setattr(owner, name, original)

    def spec_live_digest(self) -> str:
        """Of this rank's shards as they are now."""
        return refresh.live_digest(self._spec_layout())

    def spec_repair(self) -> None:
        """As it was."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    @staticmethod
    def _half_loaded(load: Any) -> Any:
        def half(weights: Any) -> None:
            load(list(weights)[:5])
            raise OSError("connection lost")

        return half
