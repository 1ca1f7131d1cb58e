"""Conversion of a jaxpr to a GraphDef: equations become nodes, inner functions become scopes."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jstep.core.programs import Operation, Subprogram, body_of, counts_of, evaluate, name_stack
from jstep.core.trees import path_str
from jstep.summary.graph.builder import GraphBuilder, Ref, Tensor, scopes_of

_HIDDEN_PARAMS = {
    "name",
    "donated_invars",
    "keep_unused",
    "ctx_mesh",
    "compiler_options_kvs",
    "inline",
    "debug",
}


def from_traced(traced: Any) -> Any:
    """Return the GraphDef of a `jax.stages.Traced`; arguments and results are named by their paths."""
    body, walker = body_of(traced.jaxpr), _Walker()
    invars, add = body.jaxpr.invars, walker.builder.add
    names = _argument_names(traced, len(invars))
    inputs = [add([], name, "Parameter", [], [_tensor(var)])[0] for var, name in zip(invars, names, strict=True)]
    constants = [
        walker.constant(value, var, "constants", f"const_{i}")
        for i, (var, value) in enumerate(zip(body.jaxpr.constvars, body.consts, strict=True))
    ]
    results = walker.operations(body, constants, inputs, "")
    names = [path_str(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
    for value, var, path in zip(results, body.jaxpr.outvars, names, strict=True):
        add(["result"], path or "value", "Result", [walker.ref(value, var, "result")], [_tensor(var)])
    return walker.builder.build()


def _argument_names(traced: Any, count: int) -> list[str]:
    """Return names such as `state/params/dense/kernel`: the name of the argument and the leaf's path in it."""
    leaves = jax.tree_util.tree_leaves_with_path(traced.args_info)
    written = getattr(getattr(traced.jaxpr.jaxpr, "debug_info", None), "arg_names", None) or ()
    names = []
    for i, (keys, _) in enumerate(leaves):
        if keys[0].idx == 1:  # keyword arguments
            names.append(path_str(keys[1:]))
            continue
        root = re.match(r"\w+", (written[i] if i < len(written) else None) or "")
        names.append("/".join(filter(None, [root.group() if root else f"arg{keys[1].idx}", path_str(keys[2:])])))
    return names if len(names) == count else [f"arg{i}" for i in range(count)]


def _tensor(var: Any) -> Tensor:
    aval = var.aval
    shape = getattr(aval, "shape", None)
    sizes = None if shape is None else tuple(n if isinstance(n, int) else -1 for n in shape)
    return Tensor(sizes, str(getattr(aval, "dtype", "")))


class _Walker:
    """Conversion of operations to nodes. Values are references, or constants that are operands."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()

    def constant(self, value: Any, var: Any, scope: str, name: str = "const") -> Ref:
        """Add the node of a constant."""
        attrs = {"value": str(value)} if np.size(value) == 1 and not isinstance(value, jax.core.Tracer) else {}
        return self.builder.add([scope], name, "Const", [], [_tensor(var)], attrs)[0]

    def ref(self, value: Any, atom: Any, scope: str) -> Ref:
        """Return the reference of a value; a constant becomes a node."""
        return value if isinstance(value, str) else self.constant(value, atom, scope)

    def operations(self, body: Subprogram, constants: Sequence[Ref], inputs: Sequence[Ref], scope: str) -> list[Any]:
        """Add the operations of a program under a scope; return its results."""
        return evaluate(
            dataclasses.replace(body, consts=tuple(constants)), inputs, functools.partial(self._operation, scope)
        )

    def _program(self, body: Subprogram, inputs: Sequence[Ref], scope: str) -> list[Ref]:
        """Add an inner program under a scope; return references to its results."""
        constants = [
            self.constant(value, var, scope) for value, var in zip(body.consts, body.jaxpr.constvars, strict=True)
        ]
        return self._refs(self.operations(body, constants, inputs, scope), body.jaxpr.outvars, scope)

    def _refs(self, values: Sequence[Any], atoms: Sequence[Any], scope: str) -> list[Ref]:
        return [self.ref(value, atom, scope) for value, atom in zip(values, atoms, strict=True)]

    def _operation(self, outer: str, operation: Operation, values: list[Any]) -> list[Ref]:
        eqn, name = operation.eqn, operation.eqn.primitive.name
        scope = "/".join(filter(None, [outer, *scopes_of(name_stack(eqn))]))
        if operation.kind == "operation":
            constants = {f"input_{i}": str(value) for i, value in enumerate(values) if not isinstance(value, str)}
            inputs = [value if isinstance(value, str) else None for value in values]
            outputs = [*map(_tensor, eqn.outvars)]
            return self.builder.add([scope], name, name, inputs, outputs, {**constants, **_attrs(eqn)})[: len(outputs)]
        if _is_call(operation):
            label, inner = str(eqn.params.get("name") or name), operation.bodies[0].operations
            # A custom_jvp_call that holds only jit[relu] becomes one scope, relu, not two.
            opened = scope if len(inner) == 1 and _is_call(inner[0]) else self.builder.scope(scope, label)
            return self._program(operation.bodies[0], self._refs(values, eqn.invars, opened), opened)
        opened = self.builder.scope(scope, operation.kind)
        build = {"scan": self._scan, "while": self._while, "cond": self._cond}[operation.kind]
        return build(operation, self._refs(values, eqn.invars, opened), opened)

    def _scan(self, operation: Operation, inputs: list[Ref], scope: str) -> list[Ref]:
        (body,), params, add = operation.bodies, operation.eqn.params, self.builder.add
        consts, carried = counts_of(params)
        attrs = {"length": str(params["length"]), "reverse": str(params["reverse"])}
        for i in range(consts, len(inputs)):
            kind = "carry" if i < consts + carried else "slice"
            (inputs[i],) = add(
                [scope], kind, f"Scan{kind.title()}", [inputs[i]], [_tensor(body.jaxpr.invars[i])], attrs
            )
        return [
            result if i < carried else add([scope], "stack", "ScanStack", [result], [_tensor(var)], attrs)[0]
            for i, (result, var) in enumerate(
                zip(self._program(body, inputs, scope), operation.eqn.outvars, strict=True)
            )
        ]

    def _while(self, operation: Operation, inputs: list[Ref], scope: str) -> list[Ref]:
        (condition, body), eqn, add = operation.bodies, operation.eqn, self.builder.add
        first = eqn.params["cond_nconsts"]
        start = first + eqn.params["body_nconsts"]
        carries = [
            add([scope], "carry", "WhileCarry", [ref], [_tensor(var)])[0]
            for ref, var in zip(inputs[start:], eqn.outvars, strict=True)
        ]
        (predicate,) = self._program(condition, inputs[:first] + carries, self.builder.scope(scope, "cond"))
        results = self._program(body, inputs[first:start] + carries, self.builder.scope(scope, "body"))
        control = f"^{predicate.partition(':')[0]}"
        return [
            add([scope], "exit", "WhileExit", [ref, control], [_tensor(var)])[0]
            for ref, var in zip(results, eqn.outvars, strict=True)
        ]

    def _cond(self, operation: Operation, inputs: list[Ref], scope: str) -> list[Ref]:
        branches = [
            self._program(branch, inputs[1:], self.builder.scope(scope, f"branch_{i}"))
            for i, branch in enumerate(operation.bodies)
        ]
        return [
            self.builder.add([scope], "merge", "Merge", [inputs[0], *refs], [_tensor(var)])[0]
            for var, *refs in zip(operation.eqn.outvars, *branches, strict=True)
        ]


def _is_call(operation: Operation) -> bool:
    return operation.kind in ("call", "shard_map")


def _attrs(eqn: Any) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in eqn.params.items()
        if key not in _HIDDEN_PARAMS
        and value is not None
        and not callable(value)
        and not isinstance(value, core.Jaxpr | core.ClosedJaxpr)
    }
