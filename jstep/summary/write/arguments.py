"""Validation and conversion of the arguments of the writer's methods."""

from typing import Any

import jax
import numpy as np

from jstep.core.checks import kind, shown
from jstep.core.trees import is_traced
from jstep.summary.proto import decode_error, is_message, proto
from jstep.summary.values import Summary, keep


def as_step(step: Any) -> Any:
    """Check a step. An array is copied, since it may be donated, and read on the writer's thread."""
    if step is None:
        return None
    if is_traced(step):
        raise TypeError(
            "global_step is traced: the writer was called inside a function that JAX transforms (jit, grad)"
        )
    if isinstance(step, jax.Array | np.ndarray | np.generic):
        if not np.issubdtype(step.dtype, np.integer) or step.shape != ():
            raise TypeError(f"global_step={shown(step, 40)}: must be an integer scalar, got {kind(step)}")
        return keep(step)
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"global_step={shown(step)}: must be an integer, got {kind(step)}")
    return step


_HINTS: dict[type, str] = {
    float: "; summary.scalar(tag, value) makes one",
    dict: "; summary.scalar(names, values) makes one from numbers, summaries_in finds those in a tree",
    list: "; summary.merge makes one from several",
    tuple: "; summary.merge makes one from several",
}


def as_serialized(x: Any, name: str, method: str, other: str) -> bytes:
    """Serialize a message of this name; both tensorboard's and TensorFlow's protos are accepted."""
    if isinstance(x, bytes | bytearray | memoryview):
        data = bytes(x)
        try:
            proto(name).FromString(data)
        except decode_error() as error:
            raise TypeError(f"{method}: {len(data)} bytes that are not a serialized {name}: {error}") from error
        return data
    if not is_message(x, name):
        other_name = "Event" if name == "Summary" else "Summary"
        hint = f"; {other} takes it" if is_message(x, other_name) or type(x) is Summary else _HINTS.get(type(x), "")
        raise TypeError(f"{method}: expected {'an' if name == 'Event' else 'a'} {name}, not {type(x).__name__}{hint}")
    serialized: bytes = x.SerializeToString()
    return serialized
