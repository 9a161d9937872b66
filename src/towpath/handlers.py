"""What an `App` knows of a handler, read from its signature when it is declared."""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from types import UnionType
from typing import Any, Required, TypeAlias, TypedDict, Unpack

from towpath.backoff import RetryPolicy, parse_duration
from towpath.context import Batch, Call, OnceCall, SyncCall, SyncTx, Tx
from towpath.errors import ConfigurationError, TowpathError
from towpath.messages import Message, MessageSpec, spec_of
from towpath.messages.limits import check_destination, check_type

AnyClass: TypeAlias = type[Any]


class Effect(StrEnum):
    """What a handler's effect is, and therefore how it is kept from happening twice."""

    TRANSACTIONAL = "transactional"
    IDEMPOTENT = "idempotent"
    AT_MOST_ONCE = "at_most_once"
    BATCH = "batch"


CONTEXTS: Mapping[Effect, type] = {
    Effect.TRANSACTIONAL: Tx,
    Effect.IDEMPOTENT: Call,
    Effect.AT_MOST_ONCE: OnceCall,
    Effect.BATCH: Tx,
}
SYNC_CONTEXTS: Mapping[Effect, type] = {Effect.TRANSACTIONAL: SyncTx, Effect.IDEMPOTENT: SyncCall}


@dataclass(frozen=True, slots=True)
class Reconcile:
    """The function that asks a provider what became of an effect."""

    function: Callable[..., Any]
    resources: Mapping[str, AnyClass]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is full, and when it starts although it is not."""

    max_size: int
    max_wait: timedelta


@dataclass(frozen=True, slots=True)
class Handler:
    """One handler of one consumer group."""

    name: str
    function: Callable[..., Any]
    effect: Effect
    type: str
    destination: str
    payload_class: AnyClass | None
    """None: raw bytes."""
    wants_message: bool
    wants_context: bool
    is_sync: bool
    """A plain function, which runs in a thread."""
    resources: Mapping[str, AnyClass]
    """Keyword-only parameters and the types that are injected."""
    retry: RetryPolicy
    timeout: timedelta
    concurrency: int | None = None
    dependency: str | None = None
    """Scope shared with other handlers of the same outside system."""
    reconcile: Reconcile | None = None
    """How to find out whether an at-most-once effect happened."""
    batch: BatchLimits | None = None
    """How many messages a batch handler takes at once, and how long it waits for them."""
    takes_null: bool = False
    """Annotated `… | None`: a null value is no failure but None."""
    spec: MessageSpec | None = field(default=None, compare=False)


class Options(TypedDict, total=False):
    """What a decorator says of a handler beside its effect and its policy."""

    timeout: Required[str | timedelta]
    concurrency: int | None
    dependency: str | None
    type_: str | None
    destination: str | None
    reconcile: Reconcile
    batch: BatchLimits


class InvalidHandler(ConfigurationError):
    """A handler's signature cannot be used; the message names the handler and the fix."""

    code = "configuration.handler"


@dataclass(frozen=True, slots=True)
class Signature:
    """What the parameters of a handler ask for."""

    payload: Any
    wants_message: bool
    wants_context: bool
    is_sync: bool
    takes_null: bool
    resources: Mapping[str, AnyClass]


def read_signature(function: Callable[..., Any], effect: Effect) -> Signature:
    """Check a handler's parameters. Raises InvalidHandler."""
    name = function.__qualname__
    is_sync = not inspect.iscoroutinefunction(function)
    if is_sync and effect not in SYNC_CONTEXTS:
        raise InvalidHandler(
            f"{name} is {effect.value} and a plain function: write `async def {function.__name__}`"
        )
    hints = _hints(name, function)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    resources = _resources(name, parameters, hints)
    if not 1 <= len(positional) <= 2:
        raise InvalidHandler(
            f"{name} takes {len(positional)} positional parameters: write (payload) or (payload, context)"
        )
    payload = hints.get(positional[0].name)
    if payload is None:
        raise InvalidHandler(f"{name}: annotate {positional[0].name!r} with the message class")
    wants_context = len(positional) == 2
    wanted = (SYNC_CONTEXTS if is_sync else CONTEXTS)[effect]
    given = hints.get(positional[1].name) if wants_context else wanted
    if given is not wanted:
        kind = f"{effect.value} and a plain function" if is_sync else effect.value
        raise InvalidHandler(
            f"{name} is {kind}: its second parameter is annotated {wanted.__name__}, "
            f"not {getattr(given, '__name__', given)}"
        )
    wants_message = typing.get_origin(payload) is Message
    if (typing.get_origin(payload) is Batch) is not (effect is Effect.BATCH):
        form = "Batch[…]" if effect is Effect.BATCH else "the message class"
        raise InvalidHandler(f"{name} is {effect.value}: annotate {positional[0].name!r} with {form}")
    if wants_message or effect is Effect.BATCH:
        (payload,) = typing.get_args(payload)
    payload, takes_null = _without_none(payload)
    return Signature(payload, wants_message, wants_context, is_sync, takes_null, resources)


def _without_none(payload: Any) -> tuple[Any, bool]:
    """`X` of `X | None`, and whether it was that. Other unions stay, to be refused as no message."""
    members = typing.get_args(payload) if typing.get_origin(payload) in (typing.Union, UnionType) else ()
    if len(members) == 2 and type(None) in members:
        return next(member for member in members if member is not type(None)), True
    return payload, False


def read_reconcile(function: Callable[..., Any]) -> Reconcile:
    """Check the parameters of a `reconcile` function. Raises InvalidHandler."""
    name = function.__qualname__
    if not inspect.iscoroutinefunction(function):
        raise InvalidHandler(f"{name} is a plain function: write `async def {function.__name__}`")
    hints = _hints(name, function)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) != 1 or hints.get(positional[0].name) is not OnceCall:
        raise InvalidHandler(f"{name} reconciles: it takes (call: OnceCall) and keyword-only resources")
    return Reconcile(function, _resources(name, parameters, hints))


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise InvalidHandler(f"{name}: an annotation cannot be resolved: {error}") from error


def _resources(
    name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]
) -> Mapping[str, AnyClass]:
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise InvalidHandler(f"{name}: *args and **kwargs cannot be injected")
    resources = {p.name: hints.get(p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    for parameter, annotation in resources.items():
        if not isinstance(annotation, type):
            raise InvalidHandler(f"{name}: the resource {parameter!r} needs a class as its annotation")
    return typing.cast("Mapping[str, AnyClass]", resources)


def message_of(
    function: Callable[..., Any], payload: Any, type_: str | None, destination: str | None
) -> tuple[str, str, MessageSpec | None]:
    """Wire type, destination and declaration of a handler's payload. Raises InvalidHandler."""
    name = function.__qualname__
    try:
        if destination is not None:
            check_destination(destination)
        if payload is bytes:
            if type_ is None or destination is None:
                raise InvalidHandler(f"{name} takes bytes: say type= and destination= in its decorator")
            return check_type(type_), destination, None
        spec = spec_of(payload)
    except InvalidHandler:
        raise
    except TowpathError as error:
        raise InvalidHandler(f"{name}: {error}") from error
    if type_ not in (None, spec.type):
        raise InvalidHandler(f"{name}: type={type_!r}, but {payload.__name__} is {spec.type!r}")
    return spec.type, destination or spec.destination, spec


def handler_of(
    function: Callable[..., Any], effect: Effect, group: str, retry: RetryPolicy, **options: Unpack[Options]
) -> Handler:
    """What a decorated function is in a group. Raises InvalidHandler."""
    signature = read_signature(function, effect)
    given, destination = options.get("type_"), options.get("destination")
    wire_type, address, spec = message_of(function, signature.payload, given, destination)
    name, concurrency = function.__qualname__, options.get("concurrency")
    if spec is not None and spec.group not in (None, group):
        raise InvalidHandler(f"{name}: {wire_type} is addressed to {spec.group!r}, not {group!r}")
    if concurrency is not None and concurrency < 1:
        raise InvalidHandler(f"{name}: concurrency must be at least 1, got {concurrency}")
    limit = parse_duration(options["timeout"])
    if not limit:
        raise InvalidHandler(f"{name}: timeout must be longer than zero")
    return Handler(
        name=function.__name__,
        function=function,
        effect=effect,
        type=wire_type,
        destination=address,
        payload_class=None if signature.payload is bytes else signature.payload,
        wants_message=signature.wants_message,
        wants_context=signature.wants_context,
        is_sync=signature.is_sync,
        resources=signature.resources,
        retry=retry,
        timeout=limit,
        concurrency=concurrency,
        dependency=options.get("dependency"),
        reconcile=options.get("reconcile"),
        batch=options.get("batch"),
        takes_null=signature.takes_null,
        spec=spec,
    )
