"""Conversion of a jaxpr to a GraphDef: equations become nodes, inner functions become scopes."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core

from jstep.core.programs import counts_of, name_stack
from jstep.core.trees import path_str
from jstep.summary.graph.builder import GraphBuilder, Ref, Tensor, scopes_of

Env: TypeAlias = dict[Any, Ref]

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
    jaxpr = traced.jaxpr.jaxpr
    builder = GraphBuilder()
    env: Env = {}
    for var, name in zip(jaxpr.invars, _argument_names(traced, len(jaxpr.invars)), strict=True):
        (env[var],) = builder.add([], name, "Parameter", [], [_tensor(var)])
    for i, (var, const) in enumerate(zip(jaxpr.constvars, traced.jaxpr.consts, strict=True)):
        attrs = (
            {"value": str(const)} if getattr(const, "size", 2) == 1 and not isinstance(const, jax.core.Tracer) else {}
        )
        (env[var],) = builder.add(["constants"], f"const_{i}", "Const", [], [_tensor(var)], attrs)
    walker = _Walker(builder)
    walker.equations(jaxpr, env, "")
    names = [path_str(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
    for var, path in zip(jaxpr.outvars, names, strict=True):
        builder.add(["result"], path or "value", "Result", [walker.ref(var, env, "result")], [_tensor(var)])
    return builder.build()


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
    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder

    def ref(self, atom: Any, env: Env, scope: str) -> Ref:
        """Return the reference of a variable; a literal becomes a constant node."""
        if not isinstance(atom, core.Literal):
            return env[atom]
        (name,) = self.builder.add([scope], "const", "Const", [], [_tensor(atom)], {"value": str(atom.val)})
        return name

    def equations(self, jaxpr: Any, env: Env, scope: str) -> None:
        for eqn in jaxpr.eqns:
            inner = "/".join(filter(None, [scope, *scopes_of(name_stack(eqn))]))
            results = self._equation(eqn, env, inner)
            env.update(zip(eqn.outvars, results, strict=True))

    def call(self, closed: Any, inputs: Sequence[Ref], scope: str) -> list[Ref]:
        """Add a function's body under a scope; return references to its results."""
        jaxpr = getattr(closed, "jaxpr", closed)
        env: Env = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
            attrs = {"value": str(const)} if getattr(const, "size", 2) == 1 else {}
            (env[var],) = self.builder.add([scope], "const", "Const", [], [_tensor(var)], attrs)
        self.equations(jaxpr, env, scope)
        return [self.ref(var, env, scope) for var in jaxpr.outvars]

    def _equation(self, eqn: Any, env: Env, scope: str) -> list[Ref]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, env, scope)
        if name == "while":
            return self._while(eqn, env, scope)
        if name == "cond":
            return self._cond(eqn, env, scope)
        body = _body(eqn)
        if body is not None:
            label = str(eqn.params.get("name") or name)
            # A custom_jvp_call that holds only jit[relu] becomes one scope, relu, not two.
            opened = scope if _is_wrapper(body) else self.builder.scope(scope, label)
            return self.call(body, self._inputs(eqn.invars, env, opened), opened)
        literals = {f"input_{i}": str(atom.val) for i, atom in enumerate(eqn.invars) if isinstance(atom, core.Literal)}
        inputs = [None if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
        return self.builder.add([scope], name, name, inputs, [*map(_tensor, eqn.outvars)], {**literals, **_attrs(eqn)})[
            : len(eqn.outvars)
        ]

    def _inputs(self, atoms: Sequence[Any], env: Env, scope: str) -> list[Ref]:
        return [self.ref(atom, env, scope) for atom in atoms]

    def _scan(self, eqn: Any, env: Env, scope: str) -> list[Ref]:
        params, add = eqn.params, self.builder.add
        opened = self.builder.scope(scope, "scan")
        inputs = self._inputs(eqn.invars, env, opened)
        consts, carried = counts_of(params)
        attrs = {"length": str(params["length"]), "reverse": str(params["reverse"])}
        body_vars = params["jaxpr"].jaxpr.invars
        for i in range(consts, len(inputs)):
            kind = "carry" if i < consts + carried else "slice"
            (inputs[i],) = add([opened], kind, f"Scan{kind.title()}", [inputs[i]], [_tensor(body_vars[i])], attrs)
        results = self.call(params["jaxpr"], inputs, opened)
        return [
            result
            if i < carried
            else add([opened], "stack", "ScanStack", [result], [_tensor(eqn.outvars[i])], attrs)[0]
            for i, result in enumerate(results)
        ]

    def _while(self, eqn: Any, env: Env, scope: str) -> list[Ref]:
        params, add = eqn.params, self.builder.add
        opened = self.builder.scope(scope, "while")
        inputs = self._inputs(eqn.invars, env, opened)
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        start = n_cond + n_body
        carries = [
            add([opened], "carry", "WhileCarry", [ref], [_tensor(var)])[0]
            for ref, var in zip(inputs[start:], eqn.outvars, strict=True)
        ]
        (predicate,) = self.call(params["cond_jaxpr"], inputs[:n_cond] + carries, self.builder.scope(opened, "cond"))
        results = self.call(params["body_jaxpr"], inputs[n_cond:start] + carries, self.builder.scope(opened, "body"))
        control = f"^{predicate.partition(':')[0]}"
        return [
            add([opened], "exit", "WhileExit", [ref, control], [_tensor(var)])[0]
            for ref, var in zip(results, eqn.outvars, strict=True)
        ]

    def _cond(self, eqn: Any, env: Env, scope: str) -> list[Ref]:
        opened = self.builder.scope(scope, "cond")
        which, *inputs = self._inputs(eqn.invars, env, opened)
        branches = [
            self.call(branch, inputs, self.builder.scope(opened, f"branch_{i}"))
            for i, branch in enumerate(eqn.params["branches"])
        ]
        return [
            self.builder.add([opened], "merge", "Merge", [which, *refs], [_tensor(var)])[0]
            for var, *refs in zip(eqn.outvars, *branches, strict=True)
        ]


def _body(eqn: Any) -> Any:
    """Return the function that an equation calls with its operands, if any (jit, remat, custom_jvp, shard_map …)."""
    inner = [p for p in eqn.params.values() if isinstance(p, core.Jaxpr | core.ClosedJaxpr)]
    if len(inner) != 1:
        return None
    jaxpr = getattr(inner[0], "jaxpr", inner[0])
    # Operands of a reducer are scalars; those of a called function have the ranks of the equation's operands.
    ranks = [len(getattr(var.aval, "shape", ())) for var in jaxpr.invars]
    fits = ranks == [len(getattr(atom.aval, "shape", ())) for atom in eqn.invars]
    return inner[0] if fits and len(jaxpr.outvars) == len(eqn.outvars) else None


def _is_wrapper(body: Any) -> bool:
    eqns = getattr(body, "jaxpr", body).eqns
    return len(eqns) == 1 and _body(eqns[0]) is not None


def _attrs(eqn: Any) -> dict[str, str]:
    return {
        key: str(value)
        for key, value in eqn.params.items()
        if key not in _HIDDEN_PARAMS
        and value is not None
        and not callable(value)
        and not isinstance(value, core.Jaxpr | core.ClosedJaxpr)
    }
