"""Compute some updates twice, and compare every bit."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from jstep.core.checks import as_int, one_of
from jstep.core.contexts import internal_transfers
from jstep.core.notes import note
from jstep.core.trees import is_array
from jstep.fingerprints.by_device import by_device
from jstep.fingerprints.fingerprint import named_leaves
from jstep.hooks.audit_result import mismatch
from jstep.hooks.run_hook import RunHook
from jstep.state import TrainState
from jstep.training import TrainStep

_logger = logging.getLogger("jstep")


class _Call(Protocol):
    """A call of several steps, or of one."""

    args: tuple[Any, ...]
    steps: int
    first: int


Take = Callable[[Any, Any], Any]
"""Takes the steps of a call: `take(state, call) -> (state, metrics)`."""
StepOf = Callable[[Any], Callable[..., Any]]
"""From a call to the training step that takes it."""
TimedSection = Callable[[], contextlib.AbstractContextManager[Any]]
"""What the time of an audit is accounted in: `with apart(): …`."""


class AuditHook(RunHook):
    """Computes an update twice every so many steps, from the same state and batch by the same program.

    The fingerprints of the two resulting states must be equal. A bit that differs is either silent data corruption, a
    device that computes wrongly without an error, or a program that is not deterministic; the error names the leaves,
    and the devices if not all of them differ (of a replicated array, each device's own copy is looked at). The second
    result, with its metrics, is dropped.

    The update N → N + 1 is audited if N is a multiple of `every_n_steps`; step 0 is one. With `steps_per_call`, the
    whole call that takes step N is repeated. The loop waits for the device at these steps, so that no hook sees a
    state that was computed wrongly, and none is saved; other steps cost nothing. An audited step takes twice its time
    and memory for a second state. Host callbacks run twice in it. A step that is a plain Python function is called
    twice, with copies of its arrays; its random numbers must be a function of the step.

    Args:
        every_n_steps: How often, in steps: at their multiples.
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
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 4, last_step=4, hooks=hooks, progress=False)

    Source: Hochschild et al., "Cores that don't count" (HotOS 2021).
    """

    def __init__(self, *, every_n_steps: int = 1000, on_mismatch: str = "raise") -> None:
        self._n = as_int(every_n_steps, "every_n_steps", 1, "a number of steps")
        self._raises = one_of(on_mismatch, "on_mismatch", ("log", "raise")) == "raise"

    def begin(self, state: TrainState) -> None:
        """Refuses a state whose leaves cannot be named or compared.

        Raises:
            TypeError: A leaf is not an array.
            ValueError: Two leaves have one path.
        """
        named_leaves(state)

    def audited_steps(self, start: int, last_step: int) -> range:
        """The steps N whose update N → N + 1 is audited, in a run from `start` to `last_step`."""
        return range(-(-start // self._n) * self._n, last_step, self._n)

    def take(self, take: Take, step_of: StepOf, apart: TimedSection, state: Any, call: _Call) -> Any:
        """Takes the steps of a call by `take`, and once more, apart, if they are to be audited.

        Raises:
            AuditError: The results differ.
        """
        if -call.first % self._n >= call.steps:
            return take(state, call)
        step = step_of(call)
        with apart():
            again, args = _kept(step, state, call.args)
        result = take(state, call)
        if not isinstance(result, tuple | list) or len(result) != 2:
            return result  # the loop refuses it
        del state  # donated, as a rule
        jax.block_until_ready(result[0])  # up to here the time is that of the step
        with apart():
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


def audited(take: Take, step_of: StepOf, hooks: Iterable[Any], apart: TimedSection = contextlib.nullcontext) -> Take:
    """What takes the steps of a call, with the audits of the hooks; `take` itself if there is none among them."""
    for hook in hooks:
        if isinstance(hook, AuditHook):
            take = functools.partial(hook.take, take, step_of, apart)
    return take


def _kept(step: Any, state: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """State and arguments for a second computation, whatever the first one does with its own."""
    if not isinstance(step, TrainStep):
        return _copied((state, args))  # a plain function may write into its arguments, or donate them
    return (_copied(state) if step.donate else state), args


def _copied(tree: Any) -> Any:
    """Copies that are sharded, and compiled for, as the originals."""
    with internal_transfers():
        return jax.tree.map(_copy, tree)


def _copy(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    made = leaf.copy()
    # JAX spells the specification of a copy in another way, and a step is traced again for that: this moves nothing.
    is_on_mesh = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    return jax.device_put(made, leaf.sharding) if is_on_mesh else made
