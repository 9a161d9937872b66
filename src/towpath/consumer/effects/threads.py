"""Plain functions as handlers: each runs in a thread, never on the loop.

A thread cannot be stopped. When its time is up the engine settles without it: its token is gone,
so whatever it still does in its transaction is rolled back.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str) -> T:
    """The function's result from a daemon thread, which never holds up the end of the process.

    Cancelling returns at once and leaves the thread to itself.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # it is a T where there is no error

    def run() -> None:
        try:
            result, error = context.run(function), None
        except BaseException as raised:  # noqa: BLE001 - carried over to the loop, which raises it
            result, error = None, raised
        if isinstance(error, StopIteration):
            error = RuntimeError("the handler raised StopIteration")
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
