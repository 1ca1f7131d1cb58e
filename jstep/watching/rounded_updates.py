"""The observer that reports when small updates of 16-bit parameters are rounded away."""

from typing import Any

import jax.numpy as jnp

from jstep.compiling.chunks import Chunk
from jstep.core import processes
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.trees import Tree
from jstep.hooks.origin import Kind
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.training.watched_updates import known_updates


class RoundedUpdates(Observer):
    """The observer that checks what the first call of a stage has updated.

    The dtypes of the parameters do not suffice: a bfloat16 model below float32 adapters is not
    updated, and loses nothing. A restart is not checked, as the first start has reported it.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._is_said = False

    def on_first_call(self, chunk: Chunk, state: Tree) -> None:
        stage = chunk.program.stage
        found = known_updates(stage.step)
        is_restart = self._run.origin.kind is Kind.RESUMED
        if (
            found is None
            or not found.rounded
            or is_restart
            or self._is_said
            or not processes.is_process_0()
        ):
            return
        self._is_said = True
        # Neighboring values differ by at least eps / 2 of their size; an update below half of that
        # is rounded away.
        finfo: Any = jnp.finfo
        lost = min(float(finfo(dtype).eps) / 4 for dtype in found.rounded.values())
        logger.info(
            "the parameters %s are %s, and %s rounds them after each update: one below %.2g of a "
            "value changes nothing; use master_weights(optimizer), "
            "stochastic_rounding(optimizer, key) or compact(optimizer), or float32 parameters "
            "that the loss casts",
            format_list(sorted(map(repr, found.rounded))),
            " and ".join(sorted({dtype.name for dtype in found.rounded.values()})),
            stage.name,
            lost,
        )
