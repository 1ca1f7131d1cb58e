"""The graph of a lowered program for TensorBoard."""

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jstep.core import checks
from jstep.stores.event_files import is_message, parse_message, proto
from jstep.stores.files import write_named
from jstep.stores.urls import join_path, location

# A GraphDef under construction: unique names, scopes, shapes and dtypes.

GRADIENTS = "gradients"
"""The scope of operations that reverse-mode differentiation adds, named as in TensorFlow."""

Ref: TypeAlias = str
"""Reference to an output of a node: `node`, or `node:1` for a later output."""

_TYPES = {"float16": "half", "float32": "float", "float64": "double"}
"""The dtypes that TensorFlow calls by another name."""
_MAX_ATTR = 500  # characters; TensorBoard shows them in a side panel


class GraphTensor(NamedTuple):
    """Shape and dtype of an output; the shape is None if it is not an array."""

    shape: tuple[int, ...] | None
    dtype: str


class GraphBuilder:
    """Builder of a GraphDef with unique names of nodes."""

    def __init__(self) -> None:
        self.graph = proto("GraphDef")()
        self.graph.versions.producer = 22
        self._nodes: set[str] = set()
        self._scopes: set[str] = set()

    def scope(self, *parts: str) -> str:
        """Open a new scope with a unique name."""
        name = self._unique(_join(parts), self._nodes | self._scopes)
        self._scopes.add(name)
        return name

    def add(
        self,
        scope: str,
        name: str,
        op: str,
        inputs: Iterable[Ref],
        outputs: Sequence[GraphTensor],
        attrs: dict[str, str] | None = None,
    ) -> list[Ref]:
        full = self._unique(_join([scope, name]), self._nodes)
        self._nodes.add(full)
        node = self.graph.node.add(name=full, op=op)
        node.input.extend(sorted(inputs, key=lambda ref: ref.startswith("^")))  # control inputs come last
        for key, text in (attrs or {}).items():
            if text:
                node.attr[key].s = checks.truncate(text, _MAX_ATTR).encode()
        if outputs and all(t.shape is not None for t in outputs):
            shape = proto("TensorShapeProto")
            shapes = [shape(dim=[{"size": n} for n in t.shape or ()]) for t in outputs]
            node.attr["_output_shapes"].list.shape.extend(shapes)
        dtype = outputs[0].dtype if outputs else ""
        number = getattr(proto("DataType"), f"DT_{_TYPES.get(dtype, dtype).upper()}", None)
        if number is not None:
            node.attr["dtype"].type = number
        return [f"{full}:{i}" if i else full for i in range(len(outputs))]

    @staticmethod
    def _unique(name: str, taken: set[str]) -> str:
        names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
        return next(free for free in names if free not in taken)


def _join(parts: Iterable[str]) -> str:
    """Join scopes into a valid GraphDef name."""
    components = [component for part in parts for component in part.split("/") if component]
    cleaned = [re.sub(r"[^A-Za-z0-9_.\-]", "_", component).lstrip("_-") for component in components]
    return "/".join(component or "op" for component in cleaned) or "op"


def name_scopes(path: str) -> list[str]:
    """Return the scopes in a JAX name stack: `transpose(jvp(dense))/mul` gives `gradients`, `dense`, `mul`."""
    # Without transformations, forward and vmapped operations of a layer share one scope.
    scopes: list[str] = []
    is_backward = False
    for component in _split(path):
        while (wrapped := re.fullmatch(r"([\w.\-]+)\((.*)\)", component)) is not None:
            transform, component = wrapped.groups()
            is_backward = is_backward or transform == "transpose"
            if transform in ("jit", "pjit"):  # the call opens its own scope
                component = ""
        scopes += _split(component) if "(" not in component else [component]
    return [GRADIENTS, *scopes] if is_backward else scopes


def _split(path: str) -> list[str]:
    """Split a path at slashes outside parentheses."""
    parts, depth = [""], 0
    for char in path:
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part]


# Conversion of StableHLO to a GraphDef.

Env: TypeAlias = dict[Any, Ref]

_OPENED = {"stablehlo.while": ("cond", "body"), "stablehlo.case": (), "stablehlo.if": ("true", "false")}
_KINDS = {"ui": "uint", "i": "int", "f": "float"}
_ELEMENTS = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}


def from_lowered(lowered: Any) -> Any:
    module = lowered.compiler_ir("stablehlo")
    views = [view.operation for view in module.body.operations]
    functions = {_text(op.attributes["sym_name"]): op for op in views if op.name == "func.func"}
    walker = _LoweredWalker(functions)
    main = functions["main"]
    block = main.regions[0].blocks[0]
    env: Env = {}
    for i, argument in enumerate(block.arguments):
        name = _path(_loc(argument.location)) or f"arg{i}"
        (env[argument],) = walker.add("", name, "Parameter", [], [_lowered_tensor(argument)])
    results = walker.block(block, env, "", [])
    infos = main.attributes["res_attrs"] if "res_attrs" in main.attributes else [{}] * len(results)
    for i, (ref, info) in enumerate(zip(results, infos, strict=True)):
        path = _path(_text(info["jax.result_info"])) if "jax.result_info" in info else ""
        walker.add("result", path.removeprefix("result/") or f"{i}", "Result", [ref], [])
    return walker.graph


class _LoweredWalker(GraphBuilder):
    def __init__(self, functions: dict[str, Any]) -> None:
        super().__init__()
        self._functions = functions

    def block(self, block: Any, env: Env, scope: str, outer: list[str]) -> list[Ref]:
        """Add the operations of a block; return references to the values it returns.

        `outer` is the location of the operation that holds the block, a prefix of the locations inside.
        """
        *views, returned = block.operations
        for view in views:
            op = view.operation
            where = _parts(_loc(op.location))
            inner = where[len(outer) :] if where[: len(outer)] == outer else where
            if outer and inner and re.fullmatch(r"cond|body|branch_\d+_fun", inner[0]):
                inner = inner[1:]  # the region already has a scope
            scopes = name_scopes("/".join(inner[:-1]))
            here = "/".join(filter(None, [scope, *scopes]))
            env.update(zip(op.results, self._operation(op, env, here, where), strict=True))
        return [env[value] for value in returned.operation.operands]

    def _operation(self, op: Any, env: Env, scope: str, where: list[str]) -> list[Ref]:
        inputs = [env[value] for value in op.operands]
        short = op.name.rpartition(".")[2]
        if op.name == "func.call":
            callee = _text(op.attributes["callee"]).strip('@"')
            body = self._functions[callee].regions[0].blocks[0]
            return self.block(body, dict(zip(body.arguments, inputs, strict=True)), self.scope(scope, callee), [])
        attrs = {name: str(op.attributes[name]) for name in op.attributes}
        kind = "Const" if op.name == "stablehlo.constant" else op.name
        if op.name in _OPENED:
            # The scope holds the operations inside, and a node that takes the inputs and the regions' results.
            scope = self.scope(scope, short)
            inputs += self._inside(op, env, scope, inputs, where)
        return self.add(scope, short, kind, inputs, [*map(_lowered_tensor, op.results)], attrs)

    def _inside(self, op: Any, env: Env, scope: str, inputs: Sequence[Ref], where: list[str]) -> list[Ref]:
        names = _OPENED[op.name] or [f"branch_{i}" for i, _ in enumerate(op.regions)]
        returned = []
        for name, region in zip(names, op.regions, strict=True):
            block = region.blocks[0]
            arguments = dict(zip(block.arguments, inputs, strict=False))
            returned += self.block(block, env | arguments, self.scope(scope, name), where)
        return returned


def _lowered_tensor(value: Any) -> GraphTensor:
    """Parse a type such as `tensor<2x3xf32>`."""
    match = re.fullmatch(r"tensor<((?:[\d?]+x)*)([\w<>]+)(?:,.*)?>", str(value.type))
    if match is None:
        return GraphTensor(None, "")
    sizes, element = match.groups()
    shape = tuple(-1 if n == "?" else int(n) for n in sizes.split("x") if n)
    written = re.fullmatch(r"(ui|i|f)(\d+)(\w*)", element)
    dtype = "".join([_KINDS[written[1]], written[2], "_" * bool(written[3]), written[3].lower()]) if written else ""
    return GraphTensor(shape, _ELEMENTS.get(element, dtype))


def _loc(location: object) -> str:
    """Return the name in a location: `loc("jit(step)/dense/mul"(…))` gives `jit(step)/dense/mul`."""
    match = re.match(r'loc\("([^"]*)"', str(location))
    return match.group(1) if match else ""


def _parts(path: str) -> list[str]:
    parts = _split(path)
    return parts[1:] if path.startswith("jit(") else parts


def _path(written: str) -> str:
    """Convert `state.params['dense']['w']` to the path `state/params/dense/w`."""
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)|^(\w+)", written)
    return "/".join(next(filter(None, key)) for key in keys)


def _text(attribute: object) -> str:
    return str(attribute).strip('"')


# Writing functions as StableHLO or as GraphDefs, which TensorBoard draws.


def graph_def(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the GraphDef of a graph, or of a function traced with `args` and `kwargs`."""
    if isinstance(graph, bytes | bytearray) or is_message(graph, "GraphDef"):
        _no_arguments(graph, args, kwargs)
        data = bytes(graph) if isinstance(graph, bytes | bytearray) else graph.SerializeToString()
        return parse_message(data, "GraphDef", "graph")
    return from_lowered(_lowered(graph, args, kwargs))


def write_graph(graph: object, logdir: str | os.PathLike[str], name: str, as_text: bool = True) -> str:
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
    checks.as_string(name, "name", "the name of a file in logdir")
    parts = name.replace(os.sep, "/").split("/")
    if os.path.isabs(name) or ".." in parts or "\0" in name or parts[-1] in ("", "."):
        raise ValueError(f"name={name!r}: must be the name of a file in logdir or below it")
    is_graph_def = is_message(graph, "GraphDef") or isinstance(graph, bytes | bytearray)
    if not checks.as_bool(as_text, "as_text"):
        data = graph_def(graph).SerializeToString()
    elif is_graph_def or name.endswith(".pbtxt"):
        data = str(graph_def(graph)).encode()
    else:
        data = _lowered(graph, (), {}).as_text().encode()
    path = join_path(logdir, name)
    write_named(path, data)
    return path


def _lowered(graph: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    staged = _staged(graph, args, kwargs)
    return staged if isinstance(staged, jax.stages.Lowered) else staged.lower()


def _staged(graph: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(graph, jax.stages.Traced | jax.stages.Lowered):
        _no_arguments(graph, args, kwargs)
        return graph
    if not callable(graph):
        raise TypeError(
            "graph: must be a jax.stages.Traced (jax.jit(f).trace(*args)), a jax.stages.Lowered, a GraphDef "
            f"or a function of no arguments, not {checks.describe_type(graph)}"
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


def _no_arguments(graph: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args or kwargs:
        raise TypeError(f"graph: a {type(graph).__name__} is traced already and takes no arguments")
