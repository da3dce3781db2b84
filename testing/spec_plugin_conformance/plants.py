"""Planted errors: one process of a run makes the engine in another one answer wrong, by files in the run's records."""

from __future__ import annotations

from pathlib import Path

#: a log-prob of each response is another one, or no number; its policy version is one too old; the self-test finds the engine
#: wrong
LOGPROB, NAN, VERSION, SELF_TEST = "log-prob", "NaN", "version", "self-test"
#: in each message that is about one of them
PLANTED = "planted by the conformance kit"
#: a log-prob that nothing has, of the first token of each response
PERTURBED = 1.0
#: the log-prob that the engine then states for that token
STATED = {LOGPROB: PERTURBED, NAN: float("nan")}


class PlantedErrors:
    """The errors that are planted in one run; every process of it sees the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, what: str) -> Path:
        return self._folder / f"plant {what}"

    def plant(self, what: str) -> None:
        """Plant this error (``LOGPROB``, ``NAN``, ``VERSION``, ``SELF_TEST``) until ``remove``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun.touch()
        self._file(what).touch()

    @property
    def _begun(self) -> Path:
        return self._folder / "plants"

    @property
    def any_yet(self) -> bool:
        """True once anything has been planted in this run, even if it was removed."""
        return self._begun.exists()

    def remove(self, what: str) -> None:
        """No longer plant this error."""
        self._file(what).unlink(missing_ok=True)

    def planted(self, what: str) -> bool:
        """True while this error is planted."""
        return self._file(what).exists()

    @property
    def place_of_version(self) -> str:
        """Where the engine keeps the policy version, ``ConformanceDriver.engine_version``; "" if the driver does not say."""
        file = self._folder / "engine version"
        return file.read_text() if file.exists() else ""

    @place_of_version.setter
    def place_of_version(self, place: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "engine version").write_text(place)
