"""The broker is away: one probe per backoff step, nothing spent, until something is acknowledged."""

from __future__ import annotations

from towpath.backoff import RetryPolicy
from towpath.brokers.ports import PublishResult
from towpath.errors import BrokerError, ConfigurationError
from towpath.relay.hooks import RelayHooks


class Away:
    """Whether the broker answers, and when to ask it again. Times are on the boot-time clock."""

    def __init__(self, backoff: RetryPolicy, hooks: RelayHooks) -> None:
        self._backoff = backoff
        self._hooks = hooks
        self._failures = 0
        self._since = 0.0
        self.until = 0.0
        """Nothing is published before; it lies in the past while the broker answers."""
        self.problem: BrokerError | ConfigurationError | None = None
        """What is wrong with the broker or with how it is set up; None when the last window went well."""

    def reached(self, now: float) -> None:
        """The broker was connected to, with nothing to publish."""
        self._failures = 0
        self.until = 0.0
        if self.problem is not None:
            self._hooks.broker_recovered(now - self._since)
            self.problem = None

    def doubt(self, problem: BrokerError | ConfigurationError, now: float) -> None:
        """Something went wrong elsewhere that is to be tried here."""
        if self.problem is None:
            self._since, self.problem = now, problem

    def forget(self) -> None:
        """Whatever failed is no business of this relay any more."""
        self._failures = 0
        self.until = 0.0
        self.problem = None

    def observe(self, result: PublishResult, now: float) -> None:
        """Take in what came of a window that was offered."""
        problem = result.unavailable or result.configuration
        settled = bool(result.acknowledged or result.refused)
        if problem is None:
            if settled:
                self.reached(now)
        else:
            if self.problem is None:
                self._since = now
            self.problem = problem
        if settled or result.unavailable is None:
            self._failures = 0
            self.until = 0.0
            if problem is not None:
                self._hooks.broker_unavailable(problem, 1, 0.0)
            return
        self._failures += 1
        wait = self._backoff.delay(self._failures).total_seconds()
        self.until = now + wait
        self._hooks.broker_unavailable(result.unavailable, self._failures, wait)
