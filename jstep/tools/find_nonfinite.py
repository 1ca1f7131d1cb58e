"""Which operation made the first NaN."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import contexts, trees
from jstep.core.checks import as_function
from jstep.core.meshes import mesh_of, using_mesh
from jstep.core.operations import Subprogram, body_of
from jstep.tools.nonfinite.loop_arguments import evaluated
from jstep.tools.nonfinite.numbers import Range, is_inexact, range_of
from jstep.tools.nonfinite.origin import Reader, origin
from jstep.tools.nonfinite.search import Found, Search
from jstep.tools.nonfinite.source import line_of
from jstep.training import TrainStep


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """What `find_nonfinite` found.

    Attributes:
        primitive: The operation, such as `log`.
        source: The line that it comes from, such as "model.py:12 (loss_fn)".
        where: What it is inside of, from the outermost in, such as "jit(loss_fn), scan iteration 3" or
            "shard_map (data 2)"; empty where it is in none.
        inputs: The range of each of its operands.
        outputs: The range of each of its results.
        reaches: Whether a result of the function is non-finite as well; else something, a `where` for instance, hides
            it.
        constant: The range of the constant that is not finite, if no operation made the number: `primitive` and
            `source` then tell what reads it first. Else None.
    """

    primitive: str
    source: str
    where: str
    inputs: tuple[Range, ...]
    outputs: tuple[Range, ...] = ()
    reaches: bool = True
    constant: Range | None = None

    def __str__(self) -> str:
        if self.constant is None:
            lines = [f"the first non-finite number is made by {self.primitive} at {self.source}"]
        elif self.primitive:
            lines = [f"a constant is not finite: {self.constant}, first read by {self.primitive} at {self.source}"]
        else:
            lines = [f"a constant is not finite, and is returned as it is: {self.constant}"]
        if self.where:
            lines.append(f"  inside of  {self.where}")
        lines += [f"  operand {i}  {one}" for i, one in enumerate(self.inputs)]
        lines += [f"  result     {one}" for one in self.outputs]
        if not self.reaches:
            lines.append("  All that the function returns is finite: something selects other numbers afterwards.")
        return "\n".join(lines)


def find_nonfinite(fn: Callable[..., Any], *args: Any) -> NonFinite | None:
    """The first operation in `fn(*args)` that makes a NaN or an infinity of finite numbers.

    The function is traced, and run once with a look at every result, also inside jit, scan, while, cond, remat,
    shard_map and custom derivatives; what it is made of is then evaluated up to that operation. Of a step that
    `minimize` returned, that is the loss, its gradient and the update; nothing is donated and nothing changes.

    Infinities among the user's constants (a mask of −inf) are not a finding, but a NaN that is made of them is one. A
    number that a `where` hides afterwards is a finding (its derivative often does not hide it); `reaches` tells. If a
    result is not finite and no operation made it so, it comes from a constant: statistics with a NaN that the function
    closes over, or `x * nan`. `constant` is then its range, and `primitive` and `source` tell what reads it first.

    Args:
        fn: Any function of arrays that JAX can trace; Python integers, texts and None among its arguments stay as they
            are, and floats where it needs them so.
        *args: Its arguments, with finite numbers.

    Returns:
        What was found, whose `str()` is a report; None if everything is finite.

    Raises:
        RuntimeError: An argument was donated to an earlier step.
        TypeError: `fn` is no function.
        ValueError: An argument has non-finite numbers already (names them).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def loss_fn(params, x):
        ...     return jnp.log(params["w"] * x).sum()
        >>> found = jstep.find_nonfinite(loss_fn, {"w": jnp.array([1.0, 0.0])}, 2.0)
        >>> found.primitive, str(found.inputs[0])
        ('log', 'float32[2] from 0 to 2')
    """
    as_function(fn, "fn", "(*args)")
    with using_mesh(mesh_of(args)):
        return _first(fn.__wrapped__ if isinstance(fn, TrainStep) else fn, args)


def _first(step: Callable[..., Any], args: tuple[Any, ...]) -> NonFinite | None:
    _check_finite(step, args)
    leaves, treedef = trees.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if trees.is_array(leaf)]
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, float | complex) and i not in arrays]

    def traced(indices: list[int]) -> Any:
        def fn(*given: Any) -> Any:
            whole = list(leaves)
            for i, one in zip(indices, given, strict=True):
                whole[i] = one
            result = step(*treedef.unflatten(whole))
            return [leaf for leaf in jax.tree.leaves(result) if trees.is_array(leaf)]

        return jax.make_jaxpr(fn)(*(leaves[i] for i in indices))

    # The user's switches are for the user's function; here NaNs are what is sought.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        try:
            closed, indices = traced(arrays + numbers), arrays + numbers
        except Exception:
            if not numbers:
                raise
            # It may ask such a number `if rate:`, which nothing that is traced could answer.
            closed, indices = traced(arrays), arrays
        given = [leaves[i] for i in indices]
        with contexts.internal_transfers():
            given = [one if trees.is_array(one) else jnp.asarray(one) for one in given]
            return _found(body_of(closed), given)


def _found(body: Subprogram, given: list[Any]) -> NonFinite | None:
    search = Search()
    try:
        results = [value for value, _ in search.run(body, given, [True] * len(given))]
        search.finish()
    except Found as found:
        return _report(found, not all(range_of(out).is_finite for out in evaluated(body, given)))
    began = origin(body, given, results)
    if began is None:
        return None
    constant = None if began.constant is None else range_of(began.constant)
    if began.reader is None:
        return NonFinite("", "unknown", "", (), (), True, constant)
    return _report(began.reader, True, constant)


def _report(found: Found | Reader, reaches: bool, constant: Range | None = None) -> NonFinite:
    operation, path = found.operation, found.path
    return NonFinite(
        operation.eqn.primitive.name,
        line_of([operation.eqn, *(step.operation.eqn for step in reversed(path))], operation.jaxpr.eqns),
        ", ".join(step.words for step in path),
        tuple(map(range_of, found.ins)),
        tuple(range_of(out) for out in found.outs if out is not None),
        reaches,
        constant,
    )


def _check_finite(fn: Any, args: tuple[Any, ...]) -> None:
    donated = trees.donated_leaf(args)
    if donated is not None:
        raise RuntimeError(
            f"args: {trees.quoted(donated)} was donated to an earlier step, whose result holds its memory now; give "
            "the state that the step returned, or that of an earlier step (jstep.replay)"
        )
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        names = []
    bad = []
    for i, arg in enumerate(args):
        for path, leaf in trees.leaves_with_paths(arg):
            if trees.is_array(leaf) or isinstance(leaf, float | complex):
                found = range_of(leaf) if is_inexact(leaf) else None
                if found and not found.is_finite:
                    name = names[i] if i < len(names) else f"args[{i}]"
                    bad.append(f"{name}{': ' if path else ''}{path} ({found})")
    if bad:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ValueError(
            f"args: must be finite, got {'; '.join(bad[:8])}{more}. What made them lies before this call: go back to "
            "an earlier step (jstep.replay)"
        )
