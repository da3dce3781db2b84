"""When drafts get another chance after draft trouble: what broke them in hour 3 may be gone in hour 4."""

from __future__ import annotations

#: weight syncs until the first fresh start; twice as many before each further one
FIRST = 8


class Recovery:
    """Counts the weight syncs of a run without drafts, up to the next fresh start, of which there are only so many."""

    def __init__(self, most: int) -> None:
        """Nothing is wrong yet.

        Args:
            most: fresh starts; 0: what breaks stays off.
        """
        self._most = most
        self.begun = 0  # fresh starts so far
        self.left: int | None = None  # weight syncs until the next one; None: there is none to come

    def failed(self, for_good: bool, soon: bool = False) -> None:
        """Draft work has failed.

        Args:
            for_good: it is known that trying again would not help.
            soon: nothing was wrong but the time: it is tried again behind the very next weight sync, the first time.
        """
        again = self.begun < self._most and not for_good
        wait = 1 if soon and not self.begun else FIRST * 2**self.begun
        self.left = wait if again else None

    def synced(self) -> bool:
        """A weight sync without drafts: is it the one behind which they are tried again."""
        if self.left is None:
            return False
        self.left -= 1
        if self.left > 0:
            return False
        self.left, self.begun = None, self.begun + 1
        return True
