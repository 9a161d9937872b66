"""At-most-once effects: a marker committed just before the call; what is lost after it is in doubt."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from towpath.consumer.effects.calling import Caller, argument_of, attempt_of
from towpath.consumer.effects.executions import Dropped, Execution, Failed, InDoubt, done
from towpath.context import OnceCall
from towpath.crashpoints import CrashPoint, crash_point
from towpath.errors import LeaseLost, UsageError
from towpath.failures import Classifier
from towpath.handlers import Handler
from towpath.outcomes import Outcome
from towpath.states import TaskState
from towpath.store.doubts import DoubtStore
from towpath.store.work import Work


class AtMostOnce:
    """Runs a handler whose effect must not be repeated blindly."""

    def __init__(
        self,
        caller: Caller,
        doubts: DoubtStore,
        classifier: Classifier,
        report_progress: Callable[[Work, Mapping[str, object]], None],
        until_available: Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]],
    ) -> None:
        self._caller = caller
        self._doubts = doubts
        self._classifier = classifier
        self._report_progress = report_progress
        self._until_available = until_available

    async def run(self, handler: Handler, work: Work, payload: object) -> Execution:
        """Done, Failed before the effect began, or InDoubt after.

        An outcome that the handler raises on purpose inside `call.once()` says that the effect did
        not happen; anything else leaves it in doubt.
        """
        marker = _Marker(self._doubts, work)

        def report(progress: Mapping[str, object]) -> None:
            self._report_progress(work, progress)

        attempt = attempt_of(work)
        call = OnceCall(attempt, once=marker.once, report=report)
        context = [call] if handler.wants_context else []
        try:
            argument = argument_of(handler, payload, attempt)
            returned = await self._caller.call(handler, work, attempt, argument, *context)
            outcome = done(handler.name, returned)
        except Exception as error:
            if marker.is_dropped:
                return Dropped()
            if not marker.is_marked:
                raise
            failure = self._classifier.classify(error)
            if isinstance(error, Outcome) and not marker.is_over:
                await self._until_available(marker.unmark)
                return Failed(failure)
            return InDoubt(failure)
        if outcome.state is TaskState.FAILED and marker.is_marked and not marker.is_over:
            await self._until_available(marker.unmark)
        return outcome


class _Marker:
    """The marker of one attempt."""

    def __init__(self, doubts: DoubtStore, work: Work) -> None:
        self._doubts = doubts
        self._work = work
        self._steps: set[str] = set()
        self.is_marked = False
        self.is_over = False
        """The block was left without an exception: the effect happened."""
        self.is_dropped = False

    @asynccontextmanager
    async def once(self, step: str) -> AsyncIterator[None]:
        if step in self._steps:
            raise UsageError(f"call.once() was used twice for step {step!r}: name each step")
        self._steps.add(step)
        if not await self._doubts.mark(self._work, step):
            self.is_dropped = True
            raise LeaseLost("the task was taken over before its effect began")
        self.is_marked = self._work.is_effect_begun = True
        crash_point(CrashPoint.MARKED_BEFORE_EFFECT)
        yield
        self.is_over = True

    async def unmark(self) -> bool:
        await self._doubts.unmark(self._work)
        self._work.is_effect_begun = False
        return True
