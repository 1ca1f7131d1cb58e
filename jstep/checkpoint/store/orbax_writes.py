"""Tracking of Orbax's concurrent writes, so that a failed save ends only when all of its writes have.

Orbax writes arrays concurrently in event loops, and raises at the first failure. The other writes would continue into a
folder that is removed by then; tensorstore prints a traceback for each one that finds its loop closed, and Orbax logs
a second failure when it is no longer silenced.
"""

import asyncio
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any


class TrackedWrites:
    """Mixin of an Orbax handler that records its writes.

    Args:
        begun: The list to append every started write to. A write ends when all tasks in its loop have ended.
        options: Options of the handler.
    """

    def __init__(self, begun: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self._begun = begun

    async def serialize(self, values: Any, infos: Sequence[Any], args: Any = None) -> Any:
        """Start to write in the background."""
        futures = await super().serialize(values, [_with_path_hook(info) for info in infos], args)  # type: ignore[misc]
        self._begun.extend(futures)
        return futures


def _with_path_hook(info: Any) -> Any:
    """Return Orbax's info of an array with a hook, which Orbax calls in the loop before it writes there."""
    if not hasattr(info, "await_path_creation"):
        return info  # another version of Orbax, which does not call the hook
    hooked = copy.copy(info)

    async def await_path_creation() -> None:
        finish_before_closing(asyncio.get_running_loop())
        await type(hooked).await_path_creation(hooked)

    hooked.await_path_creation = await_path_creation
    return hooked


def finish_before_closing(loop: asyncio.AbstractEventLoop) -> None:
    """Make a loop finish its tasks in `close`."""
    if not isinstance(loop.close, functools.partial):
        loop.close = functools.partial(_finish, loop, loop.close)  # type: ignore[method-assign]


def _finish(loop: asyncio.AbstractEventLoop, close: Callable[[], None]) -> None:
    try:
        if tasks := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(tasks))
    finally:
        close()
