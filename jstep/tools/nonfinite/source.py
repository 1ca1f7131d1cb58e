"""Places of operations: their lines in the user's code, and the operations that enclose them."""

import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jstep.core.programs import Operation, Subprogram, shard_counts

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


def enclosing(chain: Sequence[tuple[Subprogram, Operation]], position: np.ndarray[Any, Any]) -> str:
    """Return the operations that enclose another one, such as "jit(loss_fn), scan iteration 3".

    Args:
        chain: The operations, outermost first, each with its program.
        position: The position of the last one.
    """
    return ", ".join(_entered(one, inner, position) for (_, one), (inner, _) in itertools.pairwise(chain))


def _entered(operation: Operation, inner: Subprogram, position: np.ndarray[Any, Any]) -> str:
    name, params = operation.eqn.primitive.name, operation.eqn.params
    if operation.kind == "cond":
        return f"cond {inner.label}"
    if operation.kind == "shard_map":
        counts = shard_counts(operation)
        place = np.unravel_index(position[-1], tuple(counts.values()))
        return f"shard_map ({', '.join(f'{name} {i}' for name, i in zip(counts, place, strict=True))})"
    if operation.kind in ("scan", "while"):
        i = int(position[1 + 2 * operation.depth])
        at = f"iteration {params['length'] - 1 - i}, backwards" if params.get("reverse") else f"iteration {i}"
        return " ".join([operation.kind, *([inner.label] if inner.label else []), at])
    kind = {"remat2": "remat", "checkpoint": "remat", "pjit": "jit"}.get(name, name)
    called = params.get("name")
    return kind.removesuffix("_call") + (f"({called})" if called else "")
