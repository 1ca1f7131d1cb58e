"""Compute some updates twice, and compare the results bitwise."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from jstep.core.checks import as_int, one_of
from jstep.core.contexts import internal_transfers
from jstep.core.exceptions import note
from jstep.core.trees import is_array
from jstep.fingerprints.fingerprint import by_device, named_leaves
from jstep.hooks.audit_result import mismatch
from jstep.hooks.run_hook import RunHook
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class _Call(Protocol):
    """A call of one or several steps."""

    args: tuple[Any, ...]
    steps: int
    first: int


RunCall = Callable[[Any, Any], Any]
"""Runs the steps of a call: `run_call(state, call) -> (state, metrics)`."""
StepOf = Callable[[Any], Callable[..., Any]]
"""Maps a call to its training step."""
TimedSection = Callable[[], contextlib.AbstractContextManager[Any]]
"""A context manager that measures the time of an audit: `with timed(): …`."""


class AuditHook(RunHook):
    """A hook that detects silent data corruption by computing some updates twice, from the same state and batch.

    The fingerprints of the two resulting states must be equal. A difference means either silent data corruption, that
    is a device that computes wrongly without an error, or a program that is not deterministic. The error names the
    leaves, and the devices if only some of them differ (every device's copy of a replicated array is compared). The
    second result and its metrics are dropped.

    The update N → N + 1 is audited if N is a multiple of `every_n_steps`, including 0. With `steps_per_call`, the whole
    call that contains step N is repeated. The loop waits for the device at these steps, so that no wrong state is
    passed to a hook or saved; other steps cost nothing. An audited step takes twice the time, and memory for a second
    state. Host callbacks run twice in it. A step that is a plain Python function is called twice, with copies of its
    arrays; its random numbers must be a function of the step.

    Args:
        every_n_steps: Interval in steps; due at its multiples.
        on_mismatch: `"raise"` ends the run, on all processes together, without saving; `"log"` warns and continues
            with the first result.

    Raises:
        AuditError: From `train`: two results differ.
        TypeError: A leaf of the state is not an array (before the first step; names its path).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.1)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> hooks = [jstep.AuditHook(every_n_steps=2)]
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=hooks)

    Source: Hochschild et al., "Cores that don't count" (HotOS 2021).
    """

    def __init__(self, *, every_n_steps: int = 1000, on_mismatch: str = "raise") -> None:
        self._n = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        self._raises = one_of(on_mismatch, "on_mismatch", ("log", "raise")) == "raise"

    def begin(self, state: TrainState) -> None:
        """Refuse a state whose leaves cannot be named or compared.

        Raises:
            TypeError: A leaf is not an array.
            ValueError: Two leaves have one path.
        """
        named_leaves(state)

    def audited_steps(self, start: int, last_step: int) -> range:
        """The steps N whose update N → N + 1 is audited, in a run from `start` to `last_step`."""
        return range(-(-start // self._n) * self._n, last_step, self._n)

    def audit_call(self, run_call: RunCall, step_of: StepOf, timed: TimedSection, state: Any, call: _Call) -> Any:
        """Run the steps of a call, and repeat them if they are due for an audit.

        Raises:
            AuditError: The results differ.
        """
        if -call.first % self._n >= call.steps:
            return run_call(state, call)
        step = step_of(call)
        with timed():
            again, args = _preserved(step, state, call.args)
        result = run_call(state, call)
        if not isinstance(result, tuple | list) or len(result) != 2:
            return result  # the loop raises for it
        del state  # usually donated
        jax.block_until_ready(result[0])  # the time so far counts as the step's
        with timed():
            first = by_device(result[0])
            try:
                second = by_device(step(again, *args)[0])
            except Exception as error:
                note(error, f"jstep: raised while AuditHook computed step {call.first} a second time")
                raise
            del again
            found = mismatch(first, second)
        if found is not None:
            finding = found.error(call.first, call.steps)
            if self._raises:
                raise finding
            if jax.process_index() == 0:
                _logger.warning("%s The run continues with the first result.", finding)
        return result


def audited(
    run_call: RunCall, step_of: StepOf, hooks: Iterable[Any], timed: TimedSection = contextlib.nullcontext
) -> RunCall:
    """Wrap `run_call` with the audits of the hooks; returns it unchanged without an `AuditHook`."""
    for hook in hooks:
        if isinstance(hook, AuditHook):
            run_call = functools.partial(hook.audit_call, run_call, step_of, timed)
    return run_call


def _preserved(step: Any, state: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The state and arguments for the second computation, copied if the first one donates or may change them."""
    if not hasattr(step, "donate"):
        return _copied((state, args))  # a plain function may modify or donate its arguments
    return (_copied(state) if step.donate else state), args


def _copied(tree: Any) -> Any:
    """Copy all arrays, with shardings for which the step is not compiled again."""
    with internal_transfers():
        return jax.tree.map(_copy, tree)


def _copy(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    made = leaf.copy()
    # A copy has an equivalent but unequal PartitionSpec, for which the step would be traced again. This moves no data.
    is_on_mesh = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    return jax.device_put(made, leaf.sharding) if is_on_mesh else made
