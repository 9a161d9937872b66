"""Asking providers, on a schedule, what became of effects nobody saw end."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from towpath.app import App
from towpath.consumer.effects.calling import Caller, attempt_of
from towpath.consumer.pauses import Pauses
from towpath.consumer.upkeep import StoreWatch
from towpath.context import OnceCall
from towpath.errors import StoreUnavailable, UsageError
from towpath.handlers import Handler
from towpath.outcomes import DidNotHappen, Happened, StillUnknown
from towpath.states import TaskState
from towpath.store.doubts import Doubt, DoubtStore
from towpath.telemetry.logging import event_logger

_BATCH: Final = 20
_result_encoder: Final = msgspec.json.Encoder()

log = event_logger(__name__)


class Reconciler:
    """Runs `reconcile` for tasks in doubt; the time of the next question is set before each."""

    def __init__(
        self,
        app: App,
        caller: Caller,
        doubts: DoubtStore,
        *,
        watch: StoreWatch,
        pauses: Pauses,
        wake: asyncio.Event,
        every_seconds: float,
        on_progress: Callable[[str], None],
    ) -> None:
        self._app = app
        self._caller = caller
        self._doubts = doubts
        self._watch = watch
        self._pauses = pauses
        self._wake = wake
        self._every_seconds = every_seconds
        self._on_progress = on_progress
        self._handlers = {
            type_: handler for type_, handler in app.handlers.items() if handler.reconcile is not None
        }

    async def run(self) -> None:
        """Ask until cancelled; without an at-most-once handler there is nothing to do."""
        while True:
            self._on_progress("reconcile")
            await asyncio.sleep(self._every_seconds * (0.5 + random.random()))
            types = [type_ for type_ in self._handlers if not self._pauses.holds(type_)]
            if not types:
                continue
            try:
                await self._round(types)
            except StoreUnavailable as error:
                self._watch.failed(error)

    async def _round(self, types: Sequence[str]) -> None:
        policy = self._app.retry
        doubts = await self._doubts.take(
            types,
            base_seconds=policy.base_delay.total_seconds(),
            cap_seconds=policy.cap_delay.total_seconds(),
            limit=_BATCH,
        )
        self._watch.answered()
        await asyncio.gather(*(self._ask(self._handlers[doubt.work.type], doubt) for doubt in doubts))

    async def _ask(self, handler: Handler, doubt: Doubt) -> None:
        """One question. A provider that fails is asked again; a verdict settles the task."""
        work = doubt.work
        labels = {"group": self._app.name, "message_id": str(work.id), "type": work.type}
        try:
            verdict = await self._verdict(handler, doubt)
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - the provider's trouble: the doubt stays, somebody asks again
            log.warning("task.reconcile_failed", **labels, error=type(error).__name__)
            return
        if isinstance(verdict, StillUnknown):
            return
        if isinstance(verdict, DidNotHappen):
            is_resolved = await self._doubts.resolve(work, TaskState.WAITING, reason_code="did_not_happen")
        elif isinstance(verdict, Happened):
            result = None if verdict.result is None else _result_encoder.encode(verdict.result)
            is_resolved = await self._doubts.resolve(
                work, TaskState.SUCCEEDED, reason_code="happened", result=result
            )
        else:
            log.warning("task.reconcile_failed", **labels, error=f"returned {type(verdict).__name__}")
            return
        if is_resolved:
            self._wake.set()
            log.info("task.reconciled", **labels, outcome=type(verdict).__name__)

    async def _verdict(self, handler: Handler, doubt: Doubt) -> object:
        reconcile = handler.reconcile
        if reconcile is None:
            raise UsageError(f"{handler.name} has no reconcile function")
        call = OnceCall(attempt_of(doubt.work), once=_never, report=lambda _: None)
        injected = self._caller.resources_of(reconcile.resources)

        async def ask() -> object:
            return await reconcile.function(call, **injected)

        return await self._caller.bounded(handler, ask, None)


def _never(step: str, /) -> NoReturn:
    raise UsageError(f"reconcile asks, it does not act: call.once({step!r}) is refused")
