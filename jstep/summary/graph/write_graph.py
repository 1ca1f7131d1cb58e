"""Writing functions as StableHLO or as GraphDefs, which TensorBoard draws."""

import os
from typing import Any

import jax

from jstep.core.checks import as_bool
from jstep.core.checks import as_text as checked_text
from jstep.stores.files import replace_file
from jstep.stores.objects import Objects, is_url, join, location, split
from jstep.summary.graph.from_lowered import from_lowered
from jstep.summary.graph.from_traced import from_traced
from jstep.summary.records import decode_error, is_message, proto


def graph_def(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the GraphDef of a graph, or of a function traced with `args` and `kwargs`.

    Raises:
        TypeError: `graph` is neither a graph nor a function, or is a graph and arguments are given.
    """
    if isinstance(graph, bytes | bytearray) or is_message(graph, "GraphDef"):
        _no_arguments(graph, args, kwargs)
        data = bytes(graph) if isinstance(graph, bytes | bytearray) else graph.SerializeToString()
        try:
            return proto("GraphDef").FromString(data)
        except decode_error() as error:
            raise TypeError(f"graph: {len(data)} bytes that are not a serialized GraphDef: {error}") from error
    staged = _staged(graph, args, kwargs)
    return from_lowered(staged) if isinstance(staged, jax.stages.Lowered) else from_traced(staged)


def write_graph(graph: Any, logdir: str | os.PathLike[str], name: str, as_text: bool = True) -> str:
    """Write a graph to the file `logdir/name` atomically.

    As text, the graph is written as StableHLO, which XLA compiles. As binary, it is written as a GraphDef, which
    TensorBoard and Netron draw. If the name ends in `.pbtxt` or a GraphDef is given, text means a GraphDef in
    protobuf's text format.

    Args:
        graph: A `jax.stages.Traced` or `Lowered`, a `GraphDef`, or a function of no arguments.
        logdir: The directory; created if it does not exist.
        name: The name of the file, in `logdir` or below it.
        as_text: Whether to write text instead of binary.

    Returns:
        The path of the file.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The name is not inside `logdir`.
        OSError: The file cannot be written.

    Example:
        >>> import pathlib, tempfile, jax, jax.numpy as jnp, jstep.summary
        >>> traced = jax.jit(lambda x: 2.0 * x).trace(jnp.ones(3))
        >>> path = jstep.summary.write_graph(traced, tempfile.mkdtemp(), "double.mlir")
        >>> print("stablehlo.multiply" in pathlib.Path(path).read_text())
        True

    Source: TensorFlow's `tf.train.write_graph`.
    """
    logdir = location(logdir, "logdir")
    name = _file_below(name)
    is_graph_def = is_message(graph, "GraphDef") or isinstance(graph, bytes | bytearray)
    if not as_bool(as_text, "as_text"):
        data = graph_def(graph).SerializeToString()
    elif is_graph_def or name.endswith(".pbtxt"):
        data = str(graph_def(graph)).encode()
    else:
        staged = _staged(graph, (), {})
        data = (staged if isinstance(staged, jax.stages.Lowered) else staged.lower()).as_text().encode()
    path = join(logdir, name)
    if is_url(logdir):
        above, last = split(path)
        Objects(above).write(last, data)
    else:
        replace_file(path, data)
    return path


def _file_below(name: Any) -> str:
    checked_text(name, "name", "the name of a file in logdir")
    parts = name.replace(os.sep, "/").split("/")
    if os.path.isabs(name) or ".." in parts or "\0" in name or parts[-1] in ("", "."):
        raise ValueError(f"name={name!r}: must be the name of a file in logdir or below it")
    return str(name)


def _staged(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(graph, jax.stages.Traced | jax.stages.Lowered):
        _no_arguments(graph, args, kwargs)
        return graph
    if not callable(graph):
        raise TypeError(
            "graph: expected a jax.stages.Traced (jax.jit(f).trace(*args)), a jax.stages.Lowered, a GraphDef "
            f"or a function of no arguments, not {type(graph).__name__}"
        )
    trace = getattr(graph, "trace", None)
    try:
        return trace(*args, **kwargs) if callable(trace) else jax.jit(graph).trace(*args, **kwargs)
    except TypeError as error:
        if not args and not kwargs and "argument" in str(error):
            raise TypeError(
                f"graph: {getattr(graph, '__name__', graph)!r} cannot be traced without arguments: {error}. "
                "Give add_graph its arguments (arrays or jax.ShapeDtypeStruct), or jax.jit(f).trace(*args)"
            ) from error
        raise


def _no_arguments(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args or kwargs:
        raise TypeError(f"graph: a {type(graph).__name__} is traced already and takes no arguments")
