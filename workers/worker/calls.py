"""Calls of handlers, inside their middlewares; plain functions run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Sequence
from functools import partial

from workers.worker.handlers import AttemptContext, Handler, HandlerFunction, Job, Middleware, Next, SignalReason


async def call(handler: Handler, context: AttemptContext, middlewares: Sequence[Middleware]) -> object:
    """Run the handler inside its middlewares, the first of them outermost."""
    step: Next = partial(invoke, handler.fn, context.job)
    for middleware in reversed(middlewares):
        step = partial(middleware, context, step)
    return await step()


async def invoke(function: HandlerFunction, job: Job) -> object:
    """Return what the function returns; a plain one runs in a thread of its own."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        result = function(job)
    else:
        result = await _in_thread(function, job)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: HandlerFunction, job: Job) -> object:
    """Run the function in a daemon thread, so that one that never returns cannot keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function, job)
        except BaseException as caught:
            error = RuntimeError(repr(caught)) if isinstance(caught, StopIteration | GeneratorExit) else caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name=f"handler-{job.name}", daemon=True).start()
    return await _end_of(future, job)


async def _end_of(future: asyncio.Future[object], job: Job) -> object:
    """Return the result of a plain function.

    It goes on when it is cancelled, and so does its attempt, which keeps slot and lease.
    """
    abandonment = job.run.abandonment()
    awaited: list[asyncio.Future[object] | asyncio.Future[None]] = [future]
    if abandonment is not None:
        awaited.append(abandonment)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        if not future.done() and (cancelled if abandonment is None else abandonment.done()):
            future.cancel()
            raise cancelled or asyncio.CancelledError
    # A result that is there by the time of a stop counts; one that is too late or was cancelled does not.
    if cancelled is not None and job.signal.reason is not SignalReason.SHUTDOWN:
        if not future.cancelled():
            future.exception()  # retrieved, or asyncio would complain
        raise cancelled
    return future.result()
