"""By what the provenance guard judges, as docs/guards.md shows it: read from the code, nothing is simulated."""

from __future__ import annotations

from collections.abc import Iterator

from spec_plugin.policy.provenance import rules
from spec_plugin.policy.provenance.rules import DTYPES, RULES, PerStatistic

Row = tuple[str, ...]
HEAD = ("text", "held against plain text of", "test", "factor: mean, largest", "floor", "error level")
FLOOR_HEAD = ("nats: mean, largest", "", *DTYPES)
WORD_HEAD = ("word", "meaning")


def _both(of: PerStatistic) -> str:
    return ", ".join(f"{of[statistic]:g}" for statistic in rules.STATISTICS)


def rows() -> Iterator[Row]:
    """One of each rule; cells as in ``HEAD``."""
    level = f"{rules.ERROR_LEVEL:g}"
    for rule in RULES:
        test, factor = ("share", "") if rule.factor is None else ("exceedance", _both(rule.factor))
        yield rule.situation, rule.plain, test, factor, f"`{rule.floor.name}`", level
    yield (
        f"one sequence of {rules.SEQUENCE_TOKENS} tokens or more",
        f"the last {rules.PHASES} phases, at its lag; with a lag also its batch's median sequence",
        "its mean is larger",
        f"{rules.SEQUENCE_FACTOR:g} (of the largest window)",
        f"{rules.SEQUENCE_PLAUSIBLE:g} times the mean of `max_plausible`, and {rules.SEQUENCE_MOVE:g} nats a version of lag",
        "no correct run",
    )
    doubt = f"{rules.DOUBT_LEVEL:g}: left out of what is known; {level}: an alarm, too"
    yield "a phase without drafts", "as above, as if it had no control group", "", "", "", doubt


def floors() -> Iterator[Row]:
    """What the rules call by a name; cells as in ``FLOOR_HEAD``."""
    for floor in (rules.ROUNDING_FLOOR, rules.MAX_PLAUSIBLE, rules.MOVE_FLOOR, rules.MAX_MOVE):
        each = " a version of lag" if floor.per_version else ""
        yield (f"`{floor.name}`", floor.meaning, *(_both(floor.nats[dtype]) + each for dtype in DTYPES))


def words() -> Iterator[Row]:
    """What the situations mean; cells as in ``WORD_HEAD``."""
    yield (
        "lag",
        "policy versions between sampling and recomputation of a token, and steps trained since the weight sync",
    )
    yield (
        "window",
        "up to 64 tokens of a response, at random; its mean and its largest difference are judged, each for itself",
    )
    yield (
        "known",
        f"{rules.ENOUGH} windows of plain text of that lag or more; as many of drafted text are judged together",
    )
    yield (
        "control group",
        f"plain requests of the same phase; while they have fewer than {rules.CONTROL} windows, with those of the last "
        f"{rules.CONTROL_AGE} versions. With a lag: of the same version alone",
    )
    factor = _both(rules.DRAFTED_FACTOR)
    yield (
        "as far off",
        f"the median is no more than {factor} times that of the control group, which has {rules.CONTROL} windows or more",
    )
    yield (
        "measured step",
        f"its control group has {rules.MEASURED} windows or more; one of the first: there are fewer than {rules.ENOUGH} windows "
        "in earlier ones. There nothing is refused that is as far off, and the rest is by either of its two rules",
    )
    yield "share", f"significantly more than {1.0 - rules.QUANTILE:.0%} of the windows are beyond the floor (binomial)"
    yield (
        "exceedance",
        f"more windows than chance puts there are beyond the floor and beyond factor times the {rules.QUANTILE:.0%} quantile of "
        "the plain windows, or times the largest of them (negative hypergeometric; both looks together)",
    )
