"""`find_nonfinite`: the operation that made the first NaN or infinity, and its line."""

import dataclasses
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jstep.core import jaxprs, trees
from jstep.core.checks import as_function, format_list
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh
from jstep.core.tracebacks import shortens_tracebacks
from jstep.debug.nonfinite_search import Search, holds_floats, value_range
from jstep.look.arrays import Range
from jstep.training.step import TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first operation that makes a non-finite number, found by `find_nonfinite`.

    Attributes:
        primitive: The operation, such as `log`.
        source: Its line in the source code, such as "model.py:12 (loss_fn)".
        where: The enclosing operations, outermost first, such as "jit(loss_fn), scan iteration 3";
            or empty.
        inputs: The range of each operand.
        outputs: The range of each result.
        reaches: Whether a result of the function is non-finite as well, and not hidden by a later
            `where`.
        constant: The range of the non-finite constant if no operation made the number, else None.
            `primitive` and `source` are then the operation that reads it first.
        differentiated: Whether the operation is in code that is differentiated, so it may be part
            of the derivative.
    """

    primitive: str
    source: str
    where: str
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...] = ()
    reaches: bool = True
    constant: Range | None = None
    differentiated: bool = False

    def __str__(self) -> str:
        if self.constant is None:
            lines = [
                f"the first non-finite number is produced by {self.primitive} at {self.source}"
            ]
        elif self.primitive:
            lines = [
                f"a constant is not finite: {self.constant}, first read by {self.primitive} at "
                f"{self.source}"
            ]
        else:
            lines = [f"a constant is not finite, and is returned unchanged: {self.constant}"]
        if self.where:
            lines.append(f"  inside of  {self.where}")
        lines += [f"  operand {i}  {numbers}" for i, numbers in enumerate(self.inputs)]
        lines += [f"  result     {numbers}" for numbers in self.outputs]
        if self.differentiated and self.primitive and self.constant is None:
            lines.append(
                f"  If that line has no {self.primitive}, it is part of the derivative of the line."
            )
        if not self.reaches:
            lines.append(
                "  All results of the function are finite: a later operation, such as `where` or "
                "the guard of a skipped step, selects other numbers."
            )
        return "\n".join(lines)


@shortens_tracebacks
def find_nonfinite(fn: Callable[..., Any], *args: Any) -> NonFinite | None:
    """Find the first operation in `fn(*args)` that makes a NaN or an infinity from finite numbers.

    The function is traced, and evaluated one operation at a time, also inside jit, scan, while,
    cond, remat and custom derivatives; a `shard_map`, also of `lanes` on a mesh, is one operation.
    For a step returned by `minimize`, this covers the loss, its gradient and the update; nothing is
    donated.

    Infinities among constants (a mask of −inf) are not reported, but a NaN made from them is, as is
    a number that a later `where` hides, since its derivative often does not hide it. If no
    operation made the number, it comes from a constant that the function closes over.

    Args:
        fn: Any function of arrays that JAX can trace. Integers, strings and None among its
            arguments remain Python objects.
        *args: Its arguments, with finite numbers.

    Returns:
        A `NonFinite`, whose `str()` is a report; None if everything is finite.

    Raises:
        RuntimeError: An argument was donated to an earlier step.
        TypeError: `fn` is not a function.
        ValueError: An argument already has non-finite numbers; the message lists the leaves.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def loss_fn(params, x):
        ...     return jnp.log(params["w"] * x).sum()
        >>> found = jstep.find_nonfinite(loss_fn, {"w": jnp.array([1.0, 0.0])}, 2.0)
        >>> found.primitive, str(found.inputs[0])
        ('log', 'float32[2] from 0 to 2')
    """
    as_function(fn, "fn", "(*args)")
    args = trees.all_native(args, "args")
    with using_mesh(mesh_of(args)):
        return _find_first(fn.__wrapped__ if isinstance(fn, TrainStep) else fn, args)


def _find_first(step: Callable[..., Any], args: tuple[Any, ...]) -> NonFinite | None:
    _check_finite(args)
    leaves, treedef = trees.flatten(args)
    # The leaves that are traced; integers, strings and None remain Python objects.
    indices = [
        i
        for i, leaf in enumerate(leaves)
        if trees.is_array(leaf) or isinstance(leaf, float | complex)
    ]
    values = [leaves[i] for i in indices]

    def fn(*values: object) -> Any:
        result = step(*treedef.unflatten(trees.replace_leaves(leaves, indices, values)))
        return [leaf for leaf in jax.tree.leaves(result) if trees.is_array(leaf)]

    # The user's debug flags must not interrupt the search.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        closed = jax.make_jaxpr(fn)(*values)
        with internal_transfers():
            return _search(closed, values)


def _search(closed: Any, args: list[Any]) -> NonFinite | None:
    body = jaxprs.body_of(jaxprs.consts_to_arguments(closed))
    search = Search()
    search.run(body, [*closed.consts, *args], [False] * len(closed.consts) + [True] * len(args))
    if search.found is None:
        if search.constant is None:
            return None
        return NonFinite(
            primitive="", source="unknown", where="", inputs=(), constant=search.constant
        )
    *enclosing, innermost = search.found.chain
    operation = innermost.operation
    eqns = [operation.eqn, *(link.operation.eqn for link in reversed(enclosing))]
    later = [other.eqn for other in innermost.program.operations if other.number > operation.number]
    return NonFinite(
        primitive=operation.name,
        source=source_line(eqns, later),
        where=", ".join(link.label for link in enclosing),
        inputs=search.found.inputs,
        outputs=search.found.outputs,
        reaches=search.reaches,
        constant=search.constant,
        differentiated=any(map(jaxprs.is_differentiated, eqns)),
    )


def _check_finite(args: tuple[Any, ...]) -> None:
    donated = trees.find_donated(args)
    if donated is not None:
        raise RuntimeError(
            f"args: {trees.quote_path(donated)} was donated to an earlier step and deleted; use "
            "the state that the step returned, or that of an earlier step (jstep.replay)"
        )
    bad: list[str] = []
    for path, leaf in trees.leaves_with_paths(args):
        if not trees.is_array_or_number(leaf) or not holds_floats(leaf):
            continue
        numbers = value_range(leaf)
        if not numbers.is_finite:
            bad.append(f"{path} ({numbers})")
    if bad:
        raise ValueError(
            f"args: must be finite, got {format_list(bad, 8, '; ')}. They were made before this "
            "call: go back to an earlier step (jstep.replay)"
        )


# Places of operations: their lines in the user's code, and the operations that enclose them.

_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_MACHINERY = tuple(
    _OURS + name + os.sep for name in ("training", "differentiate", "loop", "debug", "evaluating")
)
_JAX = os.path.dirname(os.path.realpath(jax.__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep for name, path in sysconfig.get_paths().items() if "lib" in name
)


def source_line(eqns: Sequence[Any], later: Sequence[Any]) -> str:
    """Return the source line of an operation, such as "model.py:12 (loss_fn)".

    Args:
        eqns: The operation and those that enclose it, innermost first.
        later: Operations after it: the line of the first that has one stands for an operation
            without one.
    """
    line = _line(eqns)
    for eqn in later:
        if line is not None:
            break
        line = _line([eqn])
    return "unknown" if line is None else line


def _line(eqns: Sequence[Any]) -> str | None:
    """Return the innermost line of the user, else of jstep or a library; None if all are JAX's."""
    fallback = None
    for eqn in eqns:
        for frame in jaxprs.source_frames(eqn):
            file = os.path.realpath(frame.file_name)
            if (
                not frame.file_name
                or frame.file_name.startswith("<frozen")
                or file.startswith(_JAX)
            ):
                continue
            if file.startswith(_MACHINERY):
                # Lines further out are those that call `train`, and say nothing about the
                # operation.
                return _frame_text(fallback or frame)
            if not file.startswith((_OURS, *_LIBRARIES)):
                return _frame_text(frame)
            if fallback is None:
                fallback = frame
    return None if fallback is None else _frame_text(fallback)


def _frame_text(frame: Any) -> str:
    name = frame.function_name.rsplit(".", 1)[-1]
    return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({name})"
