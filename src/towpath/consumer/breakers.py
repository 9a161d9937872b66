"""Breakers: a dependency that fails for everybody is asked by one message at a time. Pure, clock given.

A breaker opens over failures of several different keys without a success between them, or when most
of the last deaths of a handler have one reason (a storm). While it is open no attempt and no age is
spent, nothing new is started, and one probe at a time finds out whether it is over.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from towpath.backoff import RetryPolicy
from towpath.failures import Failure
from towpath.handlers import Handler

KEYS_TO_OPEN: Final = 5
STORM_WINDOW: Final = 200
_PROBE_SECONDS: Final = 60.0
"""A probe nobody heard of again is given up after this, or after its handler's timeout."""
_BACKOFF: Final = RetryPolicy(attempts=1, base="1s", cap="1m")


@dataclass(slots=True)
class Breaker:
    """One scope: a declared dependency, or a handler by itself."""

    scope: str
    failed_keys: set[Hashable] = field(default_factory=set)
    ends: deque[str | None] = field(default_factory=lambda: deque(maxlen=STORM_WINDOW))
    """Reasons of deaths among the last ends; None for an end that was none."""
    reason: str | None = None
    """Why it is open; None while it is closed."""
    probe_at: float = 0.0
    probes_failed: int = 0
    probing_until: float | None = None
    prober: object = None
    """Who probes, or did last."""

    @property
    def is_open(self) -> bool:
        """Whether work of this scope waits."""
        return self.reason is not None

    def admits(self, now: float) -> bool:
        """Whether a message may start: always when closed, else one probe when its time has come."""
        if not self.is_open:
            return True
        is_probing = self.probing_until is not None and now < self.probing_until
        return not is_probing and now >= self.probe_at

    def probe(self, prober: object, now: float, seconds: float) -> None:
        """A message starts as the probe."""
        self.prober, self.probing_until = prober, now + seconds

    def over(self, prober: object) -> None:
        """If this is the probe, it told nothing: the next may start."""
        if self.prober is prober:
            self.prober = self.probing_until = None

    def succeeded(self) -> bool:
        """True: this closed it."""
        was_open = self.is_open
        self.failed_keys.clear()
        self.ends.append(None)
        if was_open:
            self.ends.clear()
            self.reason, self.probing_until, self.probes_failed = None, None, 0
        return was_open

    def failed(self, who: object, key: Hashable, reason: str, now: float) -> bool:
        """A failure of the dependency. True: this opened it."""
        if self.is_open:
            self._still_fails(who, now)
            return False
        self.failed_keys.add(key)
        return len(self.failed_keys) >= KEYS_TO_OPEN and self._open(reason, now)

    def died(self, who: object, reason: str, now: float) -> bool:
        """A message went to the catalog. True: there are so many that this opened it."""
        self.ends.append(reason)
        if self.is_open:
            self._still_fails(who, now)
            return False
        worst, count = Counter(end for end in self.ends if end is not None).most_common(1)[0]
        is_storm = len(self.ends) == STORM_WINDOW and count > STORM_WINDOW // 2
        return is_storm and self._open(f"storm:{worst}", now)

    def _open(self, reason: str, now: float) -> bool:
        self.reason, self.probes_failed, self.probing_until = reason, 0, None
        self.probe_at = now + _BACKOFF.delay(0).total_seconds()
        return True

    def _still_fails(self, who: object, now: float) -> None:
        """What was under way when it opened only moves the next probe."""
        if self.probing_until is not None and self.prober is who:
            self.probes_failed += 1
            self.probing_until = None
        self.probe_at = now + _BACKOFF.delay(self.probes_failed).total_seconds()


class Breakers:
    """The breakers of one consumer group, by wire type."""

    def __init__(self, handlers: Mapping[str, Handler], clock: Callable[[], float]) -> None:
        self._handlers = handlers
        self._clock = clock
        scopes = {handler.dependency or f"handler:{type_}" for type_, handler in handlers.items()}
        self._by_scope = {scope: Breaker(scope) for scope in scopes}
        self._probes: dict[Hashable, Breaker] = {}
        self._by_type = {
            type_: self._by_scope[handler.dependency or f"handler:{type_}"]
            for type_, handler in handlers.items()
        }

    def admits(self, type_: str) -> bool:
        """Whether a message of this type may start now."""
        breaker = self._by_type.get(type_)
        return breaker is None or breaker.admits(self._clock())

    def started(self, type_: str, who: Hashable) -> None:
        """It started: while the breaker is open, as its probe."""
        breaker = self._by_type.get(type_)
        if breaker is not None and breaker.is_open:
            seconds = max(_PROBE_SECONDS, self._handlers[type_].timeout.total_seconds())
            breaker.probe(who, self._clock(), seconds)
            self._probes[who] = breaker

    def over(self, who: Hashable) -> None:
        """It could not start after all, or has ended, perhaps without a word on its dependency."""
        breaker = self._probes.pop(who, None)
        if breaker is not None:
            breaker.over(who)

    def is_open(self, type_: str) -> bool:
        """Whether work of this type waits."""
        breaker = self._by_type.get(type_)
        return breaker is not None and breaker.is_open

    def outlasted_a_probe(self, type_: str) -> bool:
        """Whether a probe has failed since it opened: nobody knows how long it goes on."""
        breaker = self._by_type.get(type_)
        return breaker is not None and breaker.probes_failed > 0

    def seconds_until_probe(self, type_: str) -> float:
        """How long a message that was not admitted should rest, at least a moment."""
        breaker = self._by_type[type_]
        return max(breaker.probe_at - self._clock(), 0.1)

    def closed_types(self) -> list[str]:
        """Types of which nothing may start now."""
        return [type_ for type_ in self._by_type if not self.admits(type_)]

    def waits(self, type_: str, failure: Failure) -> timedelta | None:
        """How long a message waits for free because its dependency is away; None: it is on its own."""
        breaker = self._by_type.get(type_)
        if breaker is None or not breaker.is_open or not self._is_of_dependency(type_, failure):
            return None
        return timedelta(seconds=max(breaker.probe_at - self._clock(), 0.0)) + _BACKOFF.delay(0)

    def note_success(self, type_: str) -> Breaker | None:
        """A message of this type ended well. The breaker, if this closed it."""
        breaker = self._by_type.get(type_)
        return breaker if breaker is not None and breaker.succeeded() else None

    def note_failure(self, type_: str, who: Hashable, key: Hashable, failure: Failure) -> Breaker | None:
        """A handler raised. The breaker, if this opened it."""
        breaker = self._by_type.get(type_)
        if breaker is None or not self._is_of_dependency(type_, failure):
            return None
        return breaker if breaker.failed(who, key, failure.reason_code, self._clock()) else None

    def note_death(self, type_: str, who: Hashable, reason: str) -> Breaker | None:
        """A message of this type went to the catalog. The breaker, if this opened it."""
        breaker = self._by_type.get(type_)
        return breaker if breaker is not None and breaker.died(who, reason, self._clock()) else None

    def opened(self) -> list[Breaker]:
        """Those that are open now."""
        return [breaker for breaker in self._by_scope.values() if breaker.is_open]

    def _is_of_dependency(self, type_: str, failure: Failure) -> bool:
        """Whether a failure says something about more than its own message.

        Of a handler that declares its dependency every failure that is worth a retry does.
        """
        if failure.kind != "retry":
            return False
        if failure.scope != "message":
            return True
        return self._handlers[type_].dependency is not None and failure.max_attempts is None
