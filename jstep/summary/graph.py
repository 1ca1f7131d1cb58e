"""The graph of a traced program for TensorBoard, and programs as text."""

import itertools
import os
import re
from typing import Any

import jax

from jstep.core import checks, jaxprs, trees
from jstep.stores.event_files import is_message, parse_message, proto
from jstep.stores.files import write_named
from jstep.stores.urls import join_path, location

GRADIENTS = "gradients"
"""The scope of operations that reverse-mode differentiation adds, named as in TensorFlow."""


def graph_def(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the GraphDef of a graph, or of a function traced with `args` and `kwargs`."""
    staged = _staged(graph, args, kwargs)
    if isinstance(staged, jax.stages.Lowered):
        raise TypeError("graph: a jax.stages.Lowered has no equations; give jax.jit(f).trace(*args)")
    return _of_equations(staged) if isinstance(staged, jax.stages.Traced) else staged


def _of_equations(traced: Any) -> Any:
    """One node for each argument, equation and result of a traced function; calls and loops are one node each."""
    graph, names = proto("GraphDef")(), set[str]()
    graph.versions.producer = 22

    def add(name: str, op: str, atoms: Any = ()) -> str:
        # A GraphDef has letters, digits and these characters in names.
        base = "/".join(filter(None, (re.sub(r"[^\w.\-]", "_", part, flags=re.A) for part in name.split("/"))))
        base = base if re.match(r"[A-Za-z0-9.]", base) else f"op{base}"
        numbered = itertools.chain([base], (f"{base}_{n}" for n in itertools.count(1)))
        full = next(each for each in numbered if each not in names)
        names.add(full)
        graph.node.add(name=full, op=op, input=[refs[var] for var in jaxprs.variables(atoms)])
        return full

    refs: dict[Any, str] = {}
    program = traced.jaxpr.jaxpr
    # Paths in (positional arguments, keyword arguments): the first key tells which of them.
    paths = [path.partition("/")[2] for path in trees.leaf_paths(traced.args_info, is_leaf=_is_info)]
    refs.update((var, add(path, "Parameter")) for var, path in zip(program.invars, paths, strict=True))
    refs.update((var, add("constant", "Const")) for var in program.constvars)
    for eqn in program.eqns:
        op = eqn.primitive.name
        name = add(f"{_scope(jaxprs.name_stack(eqn))}/{eqn.params.get('name') or op}", op, eqn.invars)
        refs.update((var, f"{name}:{i}" if i else name) for i, var in enumerate(eqn.outvars))
    for atom, path in zip(program.outvars, trees.leaf_paths(traced.out_info), strict=True):
        add(f"result/{path}", "Result", [atom])
    return graph


def _is_info(x: object) -> bool:
    return hasattr(x, "donated")


def _scope(stack: str) -> str:
    """The scopes in a name stack: `transpose(jvp(dense))` gives `gradients/dense`."""
    scope = re.sub(r"[\w.\-]+\(|\)", "", stack)
    return f"{GRADIENTS}/{scope}" if "transpose(" in stack else scope


def write_graph(graph: object, logdir: str | os.PathLike[str], name: str, as_text: bool = True) -> str:
    """Write a graph to the file `logdir/name` atomically.

    As text, the graph is written as StableHLO, which XLA compiles. As binary, it is written as a GraphDef, which
    TensorBoard and Netron draw: a node for each equation of the traced function. If the name ends in `.pbtxt` or a
    GraphDef is given, text means a GraphDef in protobuf's text format.

    Args:
        graph: A `jax.stages.Traced`, a `GraphDef`, a function of no arguments or, as text, a `jax.stages.Lowered`.
        logdir: The directory; created if it does not exist.
        name: The name of the file, in `logdir` or below it.
        as_text: Whether to write text instead of binary.

    Returns:
        The path of the file.

    Raises:
        TypeError: An argument has the wrong type.
        OSError: The file cannot be written.

    Example:
        >>> import pathlib, tempfile, jax, jax.numpy as jnp, jstep.summary
        >>> traced = jax.jit(lambda x: 2.0 * x).trace(jnp.ones(3))
        >>> path = jstep.summary.write_graph(traced, tempfile.mkdtemp(), "double.mlir")
        >>> print("stablehlo.multiply" in pathlib.Path(path).read_text())
        True

    Source: TensorFlow's `tf.train.write_graph`.
    """
    path = join_path(location(logdir, "logdir"), checks.as_string(name, "name", "the name of a file in logdir"))
    staged = _staged(graph, (), {})
    if not checks.as_bool(as_text, "as_text"):
        data = graph_def(staged).SerializeToString()
    elif name.endswith(".pbtxt") or is_message(staged, "GraphDef"):
        data = str(graph_def(staged)).encode()
    else:
        lowered = staged.lower() if isinstance(staged, jax.stages.Traced) else staged
        data = lowered.as_text().encode()
    write_named(path, data)
    return path


def _staged(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A Traced, a Lowered or a GraphDef."""
    is_graph_def = is_message(graph, "GraphDef") or isinstance(graph, bytes | bytearray)
    if is_graph_def or isinstance(graph, jax.stages.Traced | jax.stages.Lowered):
        if args or kwargs:
            raise TypeError(f"graph: a {type(graph).__name__} is traced already and takes no arguments")
        if not is_graph_def:
            return graph
        data = bytes(graph) if isinstance(graph, bytes | bytearray) else graph.SerializeToString()
        return parse_message(data, "GraphDef", "graph")
    if not callable(graph):
        raise TypeError(
            "graph: must be a jax.stages.Traced (jax.jit(f).trace(*args)), a jax.stages.Lowered, a GraphDef "
            f"or a function of no arguments, not {checks.describe_type(graph)}"
        )
    return (graph if hasattr(graph, "trace") else jax.jit(graph)).trace(*args, **kwargs)
