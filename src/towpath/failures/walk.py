"""The exceptions behind an exception."""

from collections.abc import Iterator
from typing import Final

_LIMIT: Final = 64
"""Enough for any real chain; a cyclic or endless one stops here."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it and the members of groups, nearest first, each once.

    An explicit cause hides the context, as in a traceback; `raise … from None` hides both.
    """
    queue, seen = [error], {id(error)}
    for current in queue:
        yield current
        behind: list[BaseException] = []
        if isinstance(current, BaseExceptionGroup):
            behind.extend(current.exceptions)
        if current.__cause__ is not None:
            behind.append(current.__cause__)
        elif current.__context__ is not None and not current.__suppress_context__:
            behind.append(current.__context__)
        for other in behind:
            if id(other) not in seen and len(seen) < _LIMIT:
                seen.add(id(other))
                queue.append(other)


def members(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or the leaves of the group it is, in order; causes are not followed."""
    stack = [error]
    for _ in range(_LIMIT * 4):
        if not stack:
            return
        current = stack.pop()
        if isinstance(current, BaseExceptionGroup):
            stack.extend(reversed(current.exceptions))
        else:
            yield current


def heart(error: BaseException) -> BaseException:
    """The error to describe: a group of one stands for its member."""
    for _ in range(_LIMIT):
        if not isinstance(error, BaseExceptionGroup) or len(error.exceptions) != 1:
            break
        error = error.exceptions[0]
    return error
