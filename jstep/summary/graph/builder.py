"""A GraphDef under construction: unique names, scopes, shapes and dtypes."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jstep.summary.records import proto

GRADIENTS = "gradients"
"""The scope of operations that reverse-mode differentiation adds, named as in TensorFlow."""

Ref: TypeAlias = str
"""Reference to an output of a node: `node`, or `node:1` for a later output."""

_TYPES = {
    "bool": "DT_BOOL",
    "float16": "DT_HALF",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "bfloat16": "DT_BFLOAT16",
    "complex64": "DT_COMPLEX64",
    "complex128": "DT_COMPLEX128",
    "float8_e4m3fn": "DT_FLOAT8_E4M3FN",
    "float8_e5m2": "DT_FLOAT8_E5M2",
    **{f"{kind}int{bits}": f"DT_{kind.upper()}INT{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"{kind}int4": f"DT_{kind.upper()}INT4" for kind in ("", "u")},
}
_MAX_ATTR = 500  # characters; TensorBoard shows them in a side panel


class Tensor(NamedTuple):
    """Shape and dtype of an output. The shape is None if the output is not an array."""

    shape: tuple[int, ...] | None
    dtype: str


class GraphBuilder:
    """Builder of a GraphDef, with unique names of nodes."""

    def __init__(self) -> None:
        self._graph = proto("GraphDef")()
        self._graph.versions.producer = 22
        self._nodes: set[str] = set()
        self._scopes: set[str] = set()

    def scope(self, *parts: str) -> str:
        """Open a new scope; a number is appended if the name is taken."""
        name = self._unique(_join(parts), self._nodes | self._scopes)
        self._scopes.add(name)
        return name

    def add(
        self,
        scope: Sequence[str],
        name: str,
        op: str,
        inputs: Iterable[Ref | None],
        outputs: Sequence[Tensor],
        attrs: dict[str, str] | None = None,
    ) -> list[Ref]:
        """Add a node; return a reference to each of its outputs."""
        full = self._unique(_join([*scope, name]), self._nodes)
        self._nodes.add(full)
        node = self._graph.node.add(name=full, op=op)
        data = [ref for ref in inputs if ref is not None]
        node.input.extend(sorted(data, key=lambda ref: ref.startswith("^")))  # control inputs come last
        for key, text in (attrs or {}).items():
            if text:
                short = text if len(text) <= _MAX_ATTR else text[: _MAX_ATTR - 1] + "…"
                node.attr[key].s = short.encode()
        known = [t for t in outputs if t.shape is not None]
        if known and len(known) == len(outputs):
            shape = proto("TensorShapeProto")
            shapes = [shape(dim=[{"size": n} for n in t.shape or ()]) for t in outputs]
            node.attr["_output_shapes"].list.shape.extend(shapes)
        if outputs and (dtype := _TYPES.get(outputs[0].dtype)) is not None:
            node.attr["dtype"].type = proto("types").DataType.Value(dtype)
        return [full, *(f"{full}:{i}" for i in range(1, max(1, len(outputs))))]

    def build(self) -> Any:
        """Return the GraphDef."""
        return self._graph

    @staticmethod
    def _unique(name: str, taken: set[str]) -> str:
        found, n = name, 0
        while found in taken:
            n += 1
            found = f"{name}_{n}"
        return found


def _join(parts: Iterable[str]) -> str:
    """Join parts, each one scope or several, into a valid GraphDef name."""
    components = [component for part in parts for component in part.split("/") if component]
    cleaned = [re.sub(r"[^A-Za-z0-9_.\-]", "_", component).lstrip("_-") for component in components]
    return "/".join(component or "_".join(["op"]) for component in cleaned) or "op"


def scopes_of(path: str) -> list[str]:
    """Return the name scopes in a JAX name stack: `transpose(jvp(dense))/mul` gives `gradients`, `dense`, `mul`.

    Transformations are removed from the names of scopes, so that forward and vmapped operations of a layer share one
    scope. Operations of the backward pass are grouped under `gradients`.
    """
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
