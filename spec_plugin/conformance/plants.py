"""Plants: errors that one process of a run has the engine of another make, by files in the run's records."""

from __future__ import annotations

from pathlib import Path

#: a log-prob of each response is another one, or no number; its policy version is one too old; the self-test finds the engine
#: wrong
LOGPROB, NAN, VERSION, SELF_TEST = "log-prob", "NaN", "version", "self-test"
#: in each message that is about one of them
PLANTED = "planted by the conformance kit"
#: a log-prob that nothing has, of the first token of each response
PERTURBED = 1.0
#: what is then said of that token
SAID = {LOGPROB: PERTURBED, NAN: float("nan")}


class Plants:
    """Those of one run."""

    def __init__(self, folder: Path) -> None:
        """Of the run with these records."""
        self._folder = folder

    def _file(self, what: str) -> Path:
        return self._folder / f"plant {what}"

    def plant(self, what: str) -> None:
        """From here on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun.touch()
        self._file(what).touch()

    @property
    def _begun(self) -> Path:
        return self._folder / "plants"

    @property
    def any_yet(self) -> bool:
        """Has anything been planted in this run, though it may be gone."""
        return self._begun.exists()

    def remove(self, what: str) -> None:
        """Until here."""
        self._file(what).unlink(missing_ok=True)

    def planted(self, what: str) -> bool:
        """Is it now."""
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
