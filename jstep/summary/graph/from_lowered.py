"""Conversion of StableHLO to a GraphDef, for lowered functions, which have no jaxpr."""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from jstep.summary.graph.builder import GraphBuilder, Ref, Tensor, scopes_of

Env: TypeAlias = dict[Any, Ref]

_OPENED = {"stablehlo.while": ("cond", "body"), "stablehlo.case": (), "stablehlo.if": ("true", "false")}
_RETURNS = ("func.return", "stablehlo.return")
_KINDS = {"ui": "uint", "i": "int", "f": "float"}
_ELEMENTS = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}


def from_lowered(lowered: Any) -> Any:
    """Return the GraphDef of a `jax.stages.Lowered`."""
    module = lowered.compiler_ir("stablehlo")
    functions = {_text(op.attributes["sym_name"]): op for op in _operations(module.operation) if op.name == "func.func"}
    walker = _Walker(functions)
    main = functions["main"]
    block = main.regions[0].blocks[0]
    env: Env = {}
    for i, argument in enumerate(block.arguments):
        (env[argument],) = walker.builder.add(
            [], _path(_loc(argument.location)) or f"arg{i}", "Parameter", [], [_tensor(argument)]
        )
    results = walker.block(block, env, "", [])
    infos = main.attributes["res_attrs"] if "res_attrs" in main.attributes else [{}] * len(results)
    for i, (ref, info) in enumerate(zip(results, infos, strict=True)):
        path = _path(_text(info["jax.result_info"])) if "jax.result_info" in info else ""
        walker.builder.add(["result"], path.removeprefix("result/") or f"{i}", "Result", [ref], [])
    return walker.builder.build()


class _Walker:
    def __init__(self, functions: dict[str, Any]) -> None:
        self.builder = GraphBuilder()
        self._functions = functions

    def block(self, block: Any, env: Env, scope: str, outer: list[str]) -> list[Ref]:
        """Add the operations of a block; return references to the values it returns.

        `outer` is the location of the operation that holds the block, which is a prefix of the locations inside.
        """
        for view in block.operations:
            op = view.operation
            if op.name in _RETURNS:
                return [env[value] for value in op.operands]
            where = _parts(_loc(op.location))
            inner = where[len(outer) :] if where[: len(outer)] == outer else where
            if outer and inner and re.fullmatch(r"cond|body|branch_\d+_fun", inner[0]):
                inner = inner[1:]  # the region already has a scope
            scopes = scopes_of("/".join(inner[:-1]))
            here = "/".join(filter(None, [scope, *scopes]))
            env.update(zip(op.results, self._operation(op, env, here, where), strict=True))
        return []

    def _operation(self, op: Any, env: Env, scope: str, where: list[str]) -> list[Ref]:
        inputs = [env[value] for value in op.operands]
        short = op.name.rpartition(".")[2]
        if op.name == "func.call":
            callee = _text(op.attributes["callee"]).lstrip("@")
            body = self._functions[callee].regions[0].blocks[0]
            return self.block(
                body, dict(zip(body.arguments, inputs, strict=True)), self.builder.scope(scope, callee), []
            )
        outputs = [*map(_tensor, op.results)]
        attrs = {name: str(op.attributes[name]) for name in op.attributes}
        kind = "Const" if op.name == "stablehlo.constant" else op.name
        if op.name in _OPENED:
            # The scope holds the operations inside, and a node that takes the inputs and the regions' results.
            scope = self.builder.scope(scope, short)
            inputs += self._inside(op, env, scope, inputs, where)
        return self.builder.add([scope], short, kind, inputs, outputs, attrs)[: len(outputs)]

    def _inside(self, op: Any, env: Env, scope: str, inputs: Sequence[Ref], where: list[str]) -> list[Ref]:
        names = _OPENED[op.name] or [f"branch_{i}" for i, _ in enumerate(op.regions)]
        returned = []
        for name, region in zip(names, op.regions, strict=True):
            block = region.blocks[0]
            arguments = dict(zip(block.arguments, inputs, strict=False))
            returned += self.block(block, env | arguments, self.builder.scope(scope, name), where)
        return returned


def _operations(op: Any) -> list[Any]:
    return [view.operation for region in op.regions for block in region.blocks for view in block.operations]


def _tensor(value: Any) -> Tensor:
    """Parse a type such as `tensor<2x3xf32>`."""
    match = re.fullmatch(r"tensor<((?:[\d?]+x)*)([\w<>]+)(?:,.*)?>", str(value.type))
    if match is None:
        return Tensor(None, "")
    sizes, element = match.groups()
    shape = tuple(-1 if n == "?" else int(n) for n in sizes.split("x") if n)
    written = re.fullmatch(r"(ui|i|f)(\d+)(\w*)", element)
    dtype = "".join([_KINDS[written[1]], written[2], "_" * bool(written[3]), written[3].lower()]) if written else ""
    return Tensor(shape, _ELEMENTS.get(element, dtype))


def _loc(location: Any) -> str:
    """Return the name in a location: `loc("jit(step)/dense/mul"(…))` gives `jit(step)/dense/mul`."""
    match = re.match(r'loc\("([^"]*)"', str(location))
    return match.group(1) if match else ""


def _parts(path: str) -> list[str]:
    parts = re.split(r"/(?![^(]*\))", path)
    return parts[1:] if parts[0].startswith("jit(") else parts


def _path(written: str) -> str:
    """Convert `state.params['dense']['w']` to the path `state/params/dense/w`."""
    keys = re.findall(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)|^(\w+)", written)
    return "/".join(next(filter(None, key)) for key in keys)


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')
