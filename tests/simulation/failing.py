"""What a failing history leaves to read: its fewest steps, and the command that repeats them."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

S = TypeVar("S")


class Account(Protocol):
    """What came of a history."""

    trace: list[str]
    wrong: list[str]


_MOST_TRIES = 150
"""Of fewer steps: about a minute."""


def shrink(steps: Sequence[S], fails: Callable[[Sequence[S]], bool]) -> list[S]:
    """The steps without those that it also fails without: half of them, a quarter, …, single ones."""
    kept = list(steps)
    tries = 0
    size = max(1, len(kept) // 2)
    while True:
        count = len(kept)
        start = 0
        while start < len(kept):
            tries += 1
            if tries > _MOST_TRIES:
                return kept
            fewer = kept[:start] + kept[start + size :]
            if fails(fewer):
                kept = fewer
            else:
                start += size
        if size == 1 and len(kept) == count:
            return kept
        size = max(1, size // 2)


def report(
    kind: str,
    seed: int,
    steps: Sequence[S],
    simulate: Callable[[int, Sequence[S]], Account],
    defect: str = "",
) -> str:
    """The minimal trace of a failing seed. It may fail in another way than the whole history did."""
    fewest = shrink(steps, lambda some: bool(simulate(seed, some).wrong))
    account = simulate(seed, fewest)
    command = f".venv/bin/python -m tests.simulation {kind} {seed}" + (
        f" --defect '{defect}'" if defect else ""
    )
    lines = [f"seed {seed}, {len(fewest)} of {len(steps)} steps:", *account.trace, *account.wrong]
    return "\n  ".join([*lines, f"again: {command}"])
