"""Whether what was sampled stayed flat: the middle of its last third against the middle of its first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, TypeAlias

Series: TypeAlias = Sequence[tuple[float, float]]
"""Samples: the second of the run, and the value."""
Word: TypeAlias = Literal["flat", "GROWS", "by design", "not judged"]

_MEGABYTE: Final = 2.0**20
_LEAST_SAMPLES: Final = 5
"""Of each third."""


@dataclass(frozen=True)
class Tolerance:
    """What the last third may take more than the first: a share of it, and an amount."""

    share: float
    amount: float


TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "memory": Tolerance(0.1, 8 * _MEGABYTE),  # what was once needed in an outage is kept, in pieces
    "malloc": Tolerance(0.05, 1 * _MEGABYTE),
    "Python blocks": Tolerance(0.1, 20_000),  # asyncpg's prepared statements come and go
    "descriptors": Tolerance(0.0, 8),
    "database connections": Tolerance(0.0, 8),
    "journal rows": Tolerance(0.5, 200),
    "ring slots": Tolerance(0.0, 1),
    "broker depth": Tolerance(0.5, 300),
    "table": Tolerance(0.25, 0.5 * _MEGABYTE),
    "index": Tolerance(0.25, 0.5 * _MEGABYTE),
    "catalogs": Tolerance(0.25, 1 * _MEGABYTE),
}
"""By the first words of a figure's name."""
BY_DESIGN: Final[Mapping[str, str]] = {
    "dead_letter": "the catalog keeps what people decided about",
    "audit": "so does the audit",
    "scheduled_progress": "rows stay for an hour",
    "worker": "those of the dead stay for a day",
}
"""Tables, with their indexes, that grow for longer than a soak runs."""


@dataclass(frozen=True)
class Flatness:
    """The verdict about one figure."""

    figure: str
    first: float
    last: float
    most: float
    word: Word

    @property
    def is_kept(self) -> bool:
        """Whether it did not grow, or may."""
        return self.word != "GROWS"


def judge(figure: str, series: Series, since: float, until: float) -> Flatness:
    """Compare the thirds of the time from `since`, when everything was warm.

    A figure that was not sampled in both of them, such as a process that was started again, is not judged.
    """
    third = (until - since) / 3
    first = [value for at, value in series if since <= at < since + third]
    last = [value for at, value in series if until - third <= at <= until]
    most = max((value for _, value in series), default=0.0)
    if min(len(first), len(last)) < _LEAST_SAMPLES:
        return Flatness(figure, *(median(each or [0.0]) for each in (first, last)), most, "not judged")
    before, after = median(first), median(last)
    tolerance = _tolerance(figure)
    grows = after > before * (1 + tolerance.share) + tolerance.amount
    word: Word = "flat" if not grows else "by design" if reason(figure) else "GROWS"
    return Flatness(figure, before, after, most, word)


def reason(figure: str) -> str | None:
    """Why it may grow."""
    names = [name for name in BY_DESIGN if figure.rsplit(" ", maxsplit=1)[-1].startswith(name)]
    return BY_DESIGN[names[0]] if names else None


def _tolerance(figure: str) -> Tolerance:
    return next(each for start, each in TOLERANCES.items() if figure.startswith(start))
