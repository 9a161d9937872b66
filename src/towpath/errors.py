"""The error tree. Branches follow what the caller can do about it.

```
TowpathError
├── UsageError               the call is wrong: fix the code, trying again cannot help
│   ├── NoTransaction        emit/submit outside a real transaction
│   ├── UnknownType          a class that is not a registered message, a type without a handler
│   ├── InvalidMessage       key, id, owner, destination, header or datetime outside the limits
│   ├── PayloadTooLarge
│   ├── DedupeConflict       the same dedupe key was submitted with another body
│   └── TaskNotFound         no such task in this group: not committed yet, expired, or another group's
├── ConfigurationError       the deployment is wrong: fix settings, grants, schema or topology
│   ├── SettingsError
│   ├── MissingExtra         an optional dependency is not installed
│   ├── SchemaMismatch       the database schema is absent, older or newer than this library
│   ├── GroupMismatch        members of a consumer group differ in what they must agree on
│   └── TopologyError        a topic, queue or exchange is missing or declared otherwise
├── StoreError
│   ├── StoreUnavailable     the database is away: retry
│   └── LeaseLost            somebody else owns the lease now: drop the work
├── BrokerError
│   ├── BrokerUnavailable    the broker is away or slow: retry, the message is not at fault
│   │   └── BrokerUnconfirmed    another broker, or a copy of the database: a person has to confirm
│   └── MessageRefused       the broker refuses this message: too large, unroutable, malformed
├── HandlerStopped           the engine ended a handler before it was done
│   ├── HandlerTimeout       it ran longer than its own timeout: spends an attempt
│   ├── HandlerIdled         it left its transaction idle for too long: spends an attempt
│   └── DeadlinePassed       the task's absolute deadline came: no further attempt
├── HandlerCancelled         what a handler waited for was cancelled, by nobody's wish: spends an attempt
├── TaskNotSucceeded         the task whose result was awaited ended otherwise
└── DecodeError              bytes that are not what their type says
```

Each class has a stable `code` for logs and dashboards, and `retryable`: whether the same call may
succeed later without a change. Its docstring says when it is raised, and behind `Do:` what to do.
"""

import copyreg
from typing import Any, ClassVar


class TowpathError(Exception):
    """Root of every error raised on purpose by towpath.

    Do: catch it around calls into the library; `code` is for logs, `retryable` for loops.
    """

    code: ClassVar[str] = "towpath.error"
    retryable: ClassVar[bool] = False
    advice: ClassVar[str] = ""
    """What to look at, where the message cannot tell: for people who read it in a list of problems."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as it stands, past `__init__`: it may come out of a worker process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(TowpathError):
    """The call is wrong; the transaction it was made in is still usable.

    Do: correct the code; the same call fails again.
    """

    code = "usage"


class NoTransaction(UsageError):
    """The call needs an open transaction on the connection that holds the business change.

    Do: begin one around the change and the call: `async with session.begin():`.
    """

    code = "usage.no_transaction"


class UnknownType(UsageError):
    """The class or wire type is not registered.

    Do: decorate the class with `@event` or `@task`; wrap bytes in `RawMessage`.
    """

    code = "usage.unknown_type"


class InvalidMessage(UsageError):
    """A message attribute is outside its documented limits.

    Do: correct the value that the message names; the limits are on the page about producing.
    """

    code = "usage.invalid_message"


class PayloadTooLarge(UsageError):
    """The encoded payload exceeds the limit.

    Do: store the body elsewhere and send a reference, or raise the limit.
    """

    code = "usage.payload_too_large"

    def __init__(self, type_: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"payload of {type_} is {size_bytes} bytes, the limit is {limit_bytes}: "
            "store the body elsewhere and send a reference, or raise max_payload_bytes"
        )
        self.type = type_
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class DedupeConflict(UsageError):
    """A task with the same dedupe key but another body exists already.

    Do: look at the task that `task_id` names; other work needs another dedupe key.
    """

    code = "usage.dedupe_conflict"

    def __init__(self, message: str, task_id: str) -> None:
        super().__init__(message)
        self.task_id = task_id


class TaskNotFound(UsageError):
    """There is no such task in this group.

    Do: commit the transaction that submits it before asking, and name the right group.
    """

    code = "usage.task_not_found"


class ConfigurationError(TowpathError):
    """The deployment is wrong.

    Do: correct what the message names: settings, grants, schema or topology.
    """

    code = "configuration"


class SettingsError(ConfigurationError):
    """A setting is missing, unknown or malformed.

    Do: correct the variables that the message names; `towpath config show` lists all.
    """

    code = "configuration.settings"


class MissingExtra(ConfigurationError):
    """An optional dependency is not installed.

    Do: install what the message names; `extra` is its name.
    """

    code = "configuration.missing_extra"

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f'{needed_for} needs an extra: pip install "towpath[{extra}]"')
        self.extra = extra


class SchemaMismatch(ConfigurationError):
    """The database schema does not match this library.

    Do: run `towpath db upgrade`, or upgrade the library where the schema is newer.
    """

    code = "configuration.schema"


class GroupMismatch(ConfigurationError):
    """The group runs with another ordering, or other queues, than this process says.

    Do: start it as the others run, or change the group with all of its members stopped.
    """

    code = "configuration.group"


class TopologyError(ConfigurationError):
    """A topic, exchange or queue is missing or declared with other arguments.

    Do: run `towpath broker apply`; what exists with other arguments is for a person to change.
    """

    code = "configuration.topology"


class StoreError(TowpathError):
    """The database did not do what was asked."""

    code = "store"


class StoreUnavailable(StoreError):
    """The database cannot be reached or is restarting.

    Do: try again with pauses; relays and workers do so by themselves.
    """

    code = "store.unavailable"
    retryable = True
    advice = "is it running where TOWPATH_DATABASE_URL says?"


class LeaseLost(StoreError):
    """The lease lapsed or belongs to somebody else; nothing was written.

    Do: drop the work: whoever owns it now does it.
    """

    code = "store.lease_lost"


class BrokerError(TowpathError):
    """The broker did not do what was asked."""

    code = "broker"


class BrokerUnavailable(BrokerError):
    """The broker is away, frozen or too slow. Messages in flight have an unknown outcome.

    Do: try again with pauses; relays and workers do so by themselves.
    """

    code = "broker.unavailable"
    retryable = True
    advice = "is the broker running where TOWPATH_BROKER_URL says?"


class BrokerUnconfirmed(BrokerUnavailable):
    """Not the broker of this database's journal, or a copy of the database: a person has to confirm.

    Do: `towpath outbox confirm` where it is right, `towpath outbox rebase` in a copy.
    """

    code = "broker.unconfirmed"
    retryable = False
    advice = ""


class MessageRefused(BrokerError):
    """The broker refuses this one message; `reason` is stable and short, e.g. `too_large`.

    Do: repair what `reason` names, then replay or discard its dead letter.
    """

    code = "broker.message_refused"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class HandlerStopped(TowpathError):
    """The engine ended a handler before it was done; its transaction is rolled back."""

    code = "handler.stopped"


class HandlerTimeout(HandlerStopped):
    """The handler ran longer than its own timeout. Not a TimeoutError: that is what its calls raise.

    Do: give the calls inside shorter timeouts, or the handler a longer one.
    """

    code = "handler.timeout"
    retryable = True


class HandlerIdled(HandlerStopped):
    """The handler left its transaction idle for so long that the database ended it, as if its process froze.

    Do: make long calls in an idempotent handler and write inside `call.transaction()`, or before the
    first statement; or raise TOWPATH_WORKER__LEASE.
    """

    code = "handler.idled"


class DeadlinePassed(HandlerStopped):
    """The task's absolute deadline came before it was done.

    Do: nothing: the task ends EXPIRED. Submit again with a later deadline.
    """

    code = "handler.deadline_passed"


class HandlerCancelled(TowpathError):
    """The handler raised CancelledError, and nobody had stopped it: what it waited for was cancelled.

    Do: find out what cancelled it; where it may happen, catch it and raise `Retry`.
    """

    code = "handler.cancelled"


class TaskNotSucceeded(TowpathError):
    """The task whose result was awaited ended FAILED, DEAD, CANCELLED or EXPIRED.

    Do: look at `state` and `reason_code`; a dead one may be replayed.
    """

    code = "task.not_succeeded"

    def __init__(self, task_id: str, state: str, reason_code: str | None) -> None:
        super().__init__(f"task {task_id} ended {state}" + (f": {reason_code}" if reason_code else ""))
        self.task_id = task_id
        self.state = state
        self.reason_code = reason_code


class DecodeError(TowpathError):
    """Bytes on the wire or in a row that are not what their type says.

    Do: repair the producer or the class; the catalog keeps the bytes of a dead message.
    """

    code = "decode"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
