"""The graph of a traced program for TensorBoard, and programs as text."""

import itertools
import os
import re
from collections.abc import Iterable
from typing import Any

import jax

from jstep.core import checks, jaxprs, trees
from jstep.core.tracebacks import shortens_tracebacks
from jstep.stores.event_files import is_message, parse_message, proto
from jstep.stores.files import write_named
from jstep.stores.urls import join_path, location

GRADIENTS = "gradients"
"""The scope of operations that reverse-mode differentiation adds, as in TensorFlow."""


class _Graph:
    """A GraphDef that grows; `refs` are the names of the values that are known so far."""

    def __init__(self) -> None:
        self.proto = proto("GraphDef")()
        self.refs: dict[Any, str] = {}
        self.proto.versions.producer = 22
        self._names: set[str] = set()

    def add(
        self, name: str, op: str, operands: Iterable[Any] = (), results: Iterable[Any] = ()
    ) -> None:
        unique = self._unique_name(name)
        self.proto.node.add(name=unique, op=op, input=[self.refs[value] for value in operands])
        for i, result in enumerate(results):
            self.refs[result] = f"{unique}:{i}" if i else unique

    def _unique_name(self, name: str) -> str:
        """Return a unique name for a GraphDef, of letters, digits and few other characters."""
        scopes = [re.sub(r"[^\w.\-]", "_", scope, flags=re.A) for scope in name.split("/") if scope]
        base = "/".join(scopes)
        if not re.match(r"[A-Za-z0-9.]", base):
            base = f"op{base}"
        unique = base
        for n in itertools.count(1):
            if unique not in self._names:
                break
            unique = f"{base}_{n}"
        self._names.add(unique)
        return unique


def graph_def(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the GraphDef of what `SummaryWriter.add_graph` accepts."""
    staged = _staged(graph, args, kwargs)
    if isinstance(staged, jax.stages.Traced):
        return _graph_of_traced(staged)
    if isinstance(staged, jax.stages.Lowered):
        return _graph_of_lowered(staged)
    return staged


def _graph_of_traced(traced: Any) -> Any:
    graph = _Graph()
    program = traced.jaxpr.jaxpr
    # The paths are in (positional arguments, keyword arguments); the first key is dropped.
    arguments = trees.leaf_paths(traced.args_info, is_leaf=lambda info: hasattr(info, "donated"))
    paths = [path.partition("/")[2] for path in arguments]
    for var, path in zip(program.invars, paths, strict=True):
        graph.add(path, "Parameter", results=[var])
    for var in program.constvars:
        graph.add("constant", "Const", results=[var])
    for eqn in program.eqns:
        op = eqn.primitive.name
        stack = jaxprs.name_stack(eqn)
        scope = re.sub(r"[\w.\-]+\(|\)", "", stack)  # without the names of transformations
        if "transpose(" in stack:
            scope = f"{GRADIENTS}/{scope}"
        name = f"{scope}/{eqn.params.get('name') or op}"
        graph.add(name, op, jaxprs.variables(eqn.invars), eqn.outvars)
    for atom, path in zip(program.outvars, trees.leaf_paths(traced.out_info), strict=True):
        graph.add(f"result/{path}", "Result", jaxprs.variables([atom]))
    return graph.proto


def _graph_of_lowered(lowered: Any) -> Any:
    operations = [view.operation for view in lowered.compiler_ir("stablehlo").body.operations]
    main = next(
        op
        for op in operations
        if op.name == "func.func" and str(op.attributes["sym_name"]) == '"main"'
    )
    graph = _Graph()
    block = main.regions[0].blocks[0]
    for argument in block.arguments:
        graph.add("arg", "Parameter", results=[argument])
    for view in block.operations:
        op = view.operation
        called = op.name.rpartition(".")[2]
        if "callee" in op.attributes:
            called = str(op.attributes["callee"])
        graph.add(called.strip('@"'), op.name, op.operands, op.results)
    return graph.proto


@shortens_tracebacks
def write_graph(
    graph: object, logdir: str | os.PathLike[str], name: str, as_text: bool = True
) -> str:
    """Write a graph to the file `logdir/name` atomically.

    Text is StableHLO. Binary is a GraphDef, which TensorBoard and Netron draw. If the name ends in
    `.pbtxt` or a GraphDef is given, text is a GraphDef in protobuf's text format.

    Args:
        graph: A `jax.stages.Traced` or `Lowered`, a `GraphDef`, or a function of no arguments.
        logdir: The directory; created if it does not exist.
        name: The name of the file, in `logdir` or below it.
        as_text: Whether to write text instead of binary.

    Returns:
        The path of the file.

    Example:
        >>> import pathlib, tempfile, jax, jax.numpy as jnp, jstep.summary
        >>> traced = jax.jit(lambda x: 2.0 * x).trace(jnp.ones(3))
        >>> path = jstep.summary.write_graph(traced, tempfile.mkdtemp(), "double.mlir")
        >>> print("stablehlo.multiply" in pathlib.Path(path).read_text())
        True

    Source: TensorFlow's `tf.train.write_graph`.
    """
    directory = location(logdir, "logdir")
    path = join_path(directory, checks.as_string(name, "name", "the name of a file in logdir"))
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
    is_graph_def = is_message(graph, "GraphDef") or isinstance(graph, bytes | bytearray)
    if is_graph_def or isinstance(graph, jax.stages.Traced | jax.stages.Lowered):
        if args or kwargs:
            raise TypeError(
                f"graph: a {type(graph).__name__} is traced already and takes no arguments"
            )
        if not is_graph_def:
            return graph
        if isinstance(graph, bytes | bytearray):
            data = bytes(graph)
        else:
            data = graph.SerializeToString()
        return parse_message(data, "GraphDef", "graph")
    if not callable(graph):
        raise TypeError(
            "graph: must be a Traced, Lowered or GraphDef, or take no arguments, got "
            f"{checks.describe_type(graph)}"
        )
    if not hasattr(graph, "trace"):
        graph = jax.jit(graph)
    return graph.trace(*args, **kwargs)
