"""Source lines of operations in the user's code."""

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).resolve().parents[2]
_OURS = str(_ROOT) + os.sep
_MACHINERY = tuple(str(_ROOT / name) + os.sep for name in ("training", "differentiate", "loop", "tools", "evaluating"))
_JAX = tuple(str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (jax,))
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")}
)


def line_of(eqns: Sequence[Any], beside: Sequence[Any] = ()) -> str:
    """Return the source line of an operation, such as "model.py:12 (loss_fn)".

    This is the innermost line called by the step that is neither in JAX nor in a library, or else the line in the
    library or in jstep's optimizer.

    Args:
        eqns: The operation and the enclosing ones, innermost first. A function that JAX or a library compiles may have
            been traced for another caller; then the line is that of the operation that calls it.
        beside: The operations of its program, for an operation without a line: `jnp.log`, passed to a cond under vmap,
            is called by JAX only, and the next operation has the line of the cond.
    """
    found = _line(eqns)
    if found is None:
        at = next((i for i, eqn in enumerate(beside) if eqn is eqns[0]), 0)
        found = next((line for eqn in beside[at:] if (line := _line([eqn]))), None)
    return found or "unknown"


def _line(eqns: Sequence[Any]) -> str | None:
    fallback = None
    for eqn in eqns:
        traceback = eqn.source_info.traceback
        for frame in [] if traceback is None else traceback.frames:
            file = os.path.realpath(frame.file_name)
            if not frame.file_name or frame.file_name.startswith("<frozen") or file.startswith(_JAX):
                continue
            if file.startswith(_MACHINERY):
                return _text(fallback or frame)
            if not file.startswith((_OURS, *_LIBRARIES)):
                return _text(frame)
            fallback = fallback or frame
    return _text(fallback) if fallback else None


def _text(frame: Any) -> str:
    name = frame.function_name.rsplit(".", 1)[-1]
    return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({name})"
