"""A mix-in before an adapter, with something done to what the guard is shown; several wrong adapters begin here."""

from __future__ import annotations

from typing import Any

from spec_plugin.api.events import LogprobBatch


class ChangesBatches:
    spec: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        check = self.spec.session.check_logprobs

        def check_changed(batch: LogprobBatch, chosen_from: int | None = None) -> None:
            if (shown := self.changed(batch)) is not None:
                check(shown, chosen_from)

        self.spec.session.check_logprobs = check_changed

    def changed(self, batch: LogprobBatch) -> LogprobBatch | None:
        raise NotImplementedError
