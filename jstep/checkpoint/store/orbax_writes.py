"""A write of orbax that fails ends when all that was begun with it has.

Orbax writes arrays side by side in event loops, and raises at the first failure. The others would go on writing into a
folder that is cleared away by then; tensorstore prints a traceback for each that finds its loop closed, and orbax logs
a second failure when nobody silences it any more.
"""

import asyncio
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any


class TrackedWrites:
    """Mixed into a handler of orbax, so that all it has begun can be waited for.

    Args:
        begun: Where it puts every write it begins, each of which ends when nothing is under way in its loop.
        options: As the handler has them.
    """

    def __init__(self, begun: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self._begun = begun

    async def serialize(self, values: Any, infos: Sequence[Any], args: Any = None) -> Any:
        """Starts to write, in the background."""
        futures = await super().serialize(values, [_with_path_hook(info) for info in infos], args)  # type: ignore[misc]
        self._begun.extend(futures)
        return futures


def _with_path_hook(info: Any) -> Any:
    """What orbax knows of an array, with a function that it calls in the loop before it writes anything there."""
    if not hasattr(info, "await_path_creation"):
        return info  # an orbax that calls nothing; what it prints then is not ours
    hooked = copy.copy(info)

    async def await_path_creation() -> None:
        finish_before_closing(asyncio.get_running_loop())
        await type(hooked).await_path_creation(hooked)

    hooked.await_path_creation = await_path_creation
    return hooked


def finish_before_closing(loop: asyncio.AbstractEventLoop) -> None:
    """Makes a loop finish its tasks in `close`."""
    if not isinstance(loop.close, functools.partial):
        loop.close = functools.partial(_finish, loop, loop.close)  # type: ignore[method-assign]


def _finish(loop: asyncio.AbstractEventLoop, close: Callable[[], None]) -> None:
    try:
        if tasks := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(tasks))
    finally:
        close()
