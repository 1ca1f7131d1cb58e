"""Notes on the user's exceptions."""

import contextlib
import re


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, if its class allows it."""
    with contextlib.suppress(Exception):
        error.add_note(text)


_AXIS = re.compile("unbound axis name: (.+?)(?:\\.|$)")
_KEEPS_TYPES = re.compile("carry input and carry output must have equal types|branches must have equal output types")


def explain_jax(error: BaseException) -> None:
    """Add a note to an error of JAX in a user's function if its message does not show the way out."""
    text = str(error)
    if isinstance(error, NameError) and (found := _AXIS.search(text)):
        _note_once(error, _UNBOUND_AXIS.format(found[1]))
    elif isinstance(error, TypeError) and _KEEPS_TYPES.search(text):
        _note_once(error, _OF_ONE_TYPE)


def _note_once(error: BaseException, text: str) -> None:
    if text not in getattr(error, "__notes__", ()):
        note(error, text)


_UNBOUND_AXIS = (
    "A model written for pmap names its axis {0!r}. A step of jstep is one program over the whole batch, also on a "
    "mesh: leave the name out (BatchNorm without axis_name, jnp.mean for lax.pmean), or bind it with "
    "jax.vmap(fn, axis_name={0!r}) over an axis of one element: x[None]."
)
_OF_ONE_TYPE = (
    "A carry keeps its dtypes from step to step, and so does what branches return. Create states with "
    "TrainState.create, whose arrays are not weakly typed, and other initial values as arrays of their final dtype "
    "(jnp.float32(0) for 0); or cast what comes out with .astype."
)
