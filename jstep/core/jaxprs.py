"""Traced programs: their operations, and the hash that identifies them.

JAX does not document the names of its operations and their parameters. Only this file and
`differentiate/merging.py` read them; `tests/core/test_jaxprs.py` lists them, and fails with the
name that the installed JAX lacks.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jstep.core.meshes import dims_of, internal_transfers, mesh_axes_of, mesh_text, sharding_text
from jstep.core.trees import is_key

# Traced programs: their operations, also nested ones, by execution order, and their evaluation.

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""Parameters in which calls store their program."""
_OPAQUE = {"pallas_call", "custom_linear_solve"}
"""Operations whose inner programs work on blocks of arrays or run in special ways."""
_OPTIONS = {
    "scan": ("length", "reverse", "unroll"),
    "shard_map": ("mesh", "in_specs", "out_specs", "check_vma"),
}
"""Kind of an operation → the parameters from which it can be rebuilt."""

_REMAT = {"remat", "remat2", "checkpoint"}

# fmt: off
MOVES = frozenset([
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice",
    "dynamic_update_slice", "concatenate", "pad", "rev", "copy", "copy_p", "iota",
    "optimization_barrier", "split", "stop_gradient", "all_gather", "all_gather_invariant",
    "all_to_all", "ppermute",
])
# fmt: on
SLOW_IN_LOOPS = frozenset({"conv_general_dilated"})
"""Operations that are 10 to 30 times slower inside loops in XLA's CPU backend."""

COPYING = frozenset(["copy", "copy_p", "convert_element_type"])
"""Operations whose result is their operand, possibly in another dtype."""

# fmt: off
HARMLESS = MOVES.union([
    "select_n", "neg", "abs", "sign", "max", "min", "clamp", "reduce_max", "reduce_min", "sort",
    "floor", "ceil", "round", "real", "imag", "conj", "logistic", "tanh", "sin", "cos", "erf",
    "cummax", "cummin", "argmax", "argmin", "is_finite", "sharding_constraint", "device_put",
    "name", "pvary", "mesh_cast", "reshard",
])
# fmt: on
"""Operations whose results are finite if their operands are finite."""

_PLACING = {"sharding_constraint", "shard_map", "reshard", "mesh_cast"}

# fmt: off
ELEMENTWISE = frozenset([
    "abs", "add", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos",
    "div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "optimization_barrier", "or", "pow", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tanh", "xor",
])
# fmt: on
"""Operations that compute each element from the corresponding elements, or from scalars."""


@dataclasses.dataclass(frozen=True)
class Subprogram:
    jaxpr: Any
    consts: tuple[Any, ...]
    operations: tuple["Operation", ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: its `kind` is "operation", "call", "scan", "while", "cond" or "shard_map".

    Nested operations have higher numbers; a while has condition and body.
    """

    number: int
    eqn: Any
    jaxpr: Any
    name: str
    kind: str
    bodies: tuple[Subprogram, ...] = ()

    @property
    def options(self) -> Mapping[str, Any]:
        return {name: self.eqn.params[name] for name in _OPTIONS.get(self.kind, ())}

    @property
    def called(self) -> str:
        return str(self.eqn.params.get("name") or "")

    @property
    def counts(self) -> tuple[int, int]:
        """Two counts of arguments: a scan's constants and carry; constants of a while's bodies."""
        params = self.eqn.params
        if self.kind == "while":
            return params["cond_nconsts"], params["body_nconsts"]
        if "num_consts" in params:
            return params["num_consts"], params["num_carry"]
        consts, carried, _ = params["ft_in"].unpack()  # JAX 0.12: three trees
        return len(consts), len(carried)

    @property
    def is_of_platforms(self) -> bool:
        """Whether a cond selects by platform: the compiler sees only one branch."""
        return self.eqn.params.get("branches_platforms") is not None


def _name(eqn: Any) -> str:
    return str(eqn.primitive.name)


def name_stack(eqn: object) -> str:
    # Some versions of JAX may lack the attribute.
    return str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))


def source_frames(eqn: Any) -> Sequence[Any]:
    traceback = eqn.source_info.traceback
    return [] if traceback is None else traceback.frames


def is_differentiated(eqn: object) -> bool:
    return "jvp" in name_stack(eqn)


def programs_in(eqn: Any) -> Iterator[core.Jaxpr]:
    """Yield the programs that an operation calls, such as the body of a scan or a reduction."""
    for program in _programs_with_consts(eqn):
        yield getattr(program, "jaxpr", program)


def _programs_with_consts(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            if isinstance(getattr(item, "jaxpr", item), core.Jaxpr):
                yield item


def all_equations(program: Any, enclosing: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield each operation of a program, also of nested ones, after those that enclose it."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield *enclosing, eqn
        for inner in programs_in(eqn):
            yield from all_equations(inner, (*enclosing, eqn))


def body_of(closed: object) -> Subprogram:
    return _subprogram(closed, itertools.count())


def walk(body: Subprogram) -> Iterator[Operation]:
    for operation in body.operations:
        yield operation
        yield from nested_operations(operation)


def nested_operations(operation: Operation) -> Iterator[Operation]:
    for body in operation.bodies:
        yield from walk(body)


def _subprogram(jaxpr: Any, numbers: Iterator[int], *, is_sharded: bool = False) -> Subprogram:
    consts = tuple(getattr(jaxpr, "consts", ()))
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    operations = tuple(_as_operation(eqn, jaxpr, numbers, is_sharded) for eqn in jaxpr.eqns)
    return Subprogram(jaxpr, consts, operations)


def _as_operation(eqn: Any, jaxpr: object, numbers: Iterator[int], is_sharded: bool) -> Operation:
    # Before those of its bodies: nested operations have higher numbers.
    number = next(numbers)
    kind, programs = _kind_and_programs(eqn, is_sharded)
    is_sharded = is_sharded or kind == "shard_map"
    bodies = tuple(_subprogram(program, numbers, is_sharded=is_sharded) for program in programs)
    return Operation(number, eqn, jaxpr, _name(eqn), kind, bodies)


def _kind_and_programs(eqn: Any, is_sharded: bool) -> tuple[str, Sequence[Any]]:
    """Return the kind of an operation, and the programs of its bodies."""
    name = _name(eqn)
    params = eqn.params
    if name == "scan":
        return "scan", (params["jaxpr"],)
    if name == "while":
        return "while", (params["cond_jaxpr"], params["body_jaxpr"])
    if name == "cond":
        return "cond", params["branches"]
    if name == "shard_map":
        # A nested shard_map is treated as opaque, as is one of a JAX version with other parameters.
        has_options = all(key in params for key in _OPTIONS["shard_map"])
        if is_sharded or not (has_options and _manual_axes(params)):
            return "operation", ()
        return "shard_map", (params["jaxpr"],)
    if name in _OPAQUE:
        return "operation", ()
    for key in _CALLED:
        if _is_program(params.get(key), eqn):
            return "call", (params[key],)
    return "operation", ()


def _manual_axes(params: Mapping[str, Any]) -> Any:
    # JAX 0.10.0 has the second name.
    return params.get("newly_manual_axes") or params.get("manual_axes")


def shard_counts(operation: Operation) -> dict[str, int]:
    mesh = operation.options["mesh"]
    manual = _manual_axes(operation.eqn.params)
    return {name: mesh.shape[name] for name in mesh.axis_names if name in manual}


def has_remat(body: Subprogram) -> bool:
    return any(
        operation.name in _REMAT and operation.eqn.params.get("differentiated")
        for operation in walk(body)
    )


def _is_program(value: object, eqn: Any) -> bool:
    """Whether a parameter is called, unlike the scalar program of a reduction."""
    jaxpr = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
    if not isinstance(jaxpr, core.Jaxpr):
        return False
    if not isinstance(value, core.ClosedJaxpr) and jaxpr.constvars:
        return False
    if _shapes(jaxpr.invars) != _shapes(eqn.invars):
        return False
    return _shapes(jaxpr.outvars) == _shapes(eqn.outvars)


def _shapes(atoms: Any) -> list[Any]:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def apply(operation: Operation, values: Sequence[Any]) -> list[Any]:
    # Evaluated as a program with one operation, because the API to bind primitives changes between
    # versions of JAX.
    eqn = operation.eqn
    pairs = zip(eqn.invars, values, strict=True)
    env = {atom: value for atom, value in pairs if not isinstance(atom, core.Literal)}
    used = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    program = subprogram(operation.jaxpr, list(env), used, [eqn])
    results = dict(zip(used, jax.core.eval_jaxpr(program, (), *env.values()), strict=True))
    return [results.get(var) for var in eqn.outvars]


def repeated_number(
    operation: Operation, values: Sequence[Any], max_bytes: int
) -> np.ndarray[Any, Any] | None:
    """The result of an operation that repeats one constant number; None for any other."""
    if (
        operation.name != "broadcast_in_dim"
        or isinstance(values[0], jax.Array)
        or np.ndim(values[0])
    ):
        return None
    result = operation.eqn.outvars[0].aval
    if result.size * result.dtype.itemsize > max_bytes:
        return None
    return np.full(result.shape, values[0], result.dtype)


def subprogram(
    jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any], eqns: Sequence[Any]
) -> Any:
    return jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(eqns))


def part_for(
    closed: Any, results: list[bool], *, keeps_arguments: bool = True
) -> tuple[Any, list[bool]]:
    """Return the part of a program for the marked results, and which arguments it needs."""
    jaxpr, used, arguments = dce_jaxpr_consts(closed.jaxpr, results, keeps_arguments)
    consts = [const for const, is_used in zip(closed.consts, used, strict=True) if is_used]
    return core.ClosedJaxpr(jaxpr, consts), arguments


def consts_to_arguments(closed: Any) -> Any:
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate(
    body: Subprogram,
    values: Sequence[Any],
    apply_operation: Callable[[Operation, list[Any]], Sequence[Any]] = apply,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluate a program on values of any kind: what `apply_operation` and `constant` return."""
    consts = map(constant, body.consts)
    env = dict(zip([*body.jaxpr.constvars, *body.jaxpr.invars], [*consts, *values], strict=True))

    def read(atom: object) -> Any:
        return constant(atom.val) if isinstance(atom, core.Literal) else env[atom]

    last_use: dict[Any, Operation] = {}
    for operation in body.operations:
        last_use.update(dict.fromkeys(variables(operation.eqn.invars), operation))
    for var in variables(body.jaxpr.outvars):
        last_use.pop(var, None)
    for operation in body.operations:
        results = apply_operation(operation, [read(atom) for atom in operation.eqn.invars])
        env.update(zip(operation.eqn.outvars, results, strict=True))
        for var in set(variables(operation.eqn.invars)):
            if last_use.get(var) is operation:
                del env[var]  # an array needs no memory after its last use
    return [read(atom) for atom in body.jaxpr.outvars]


def copied_inputs(body: Subprogram) -> list[int | None]:
    """Return, for each result of a program, the number of the input that it copies, or None.

    The copy may have another dtype.
    """

    def inputs_of(operation: Operation, operands: list[int | None]) -> list[int | None]:
        if operation.kind == "call":
            return evaluate(operation.bodies[0], operands, inputs_of, lambda constant: None)
        return operands if operation.name in COPYING else [None] * len(operation.eqn.outvars)

    # The program is evaluated on the numbers of the inputs in place of their values.
    return evaluate(body, range(len(body.jaxpr.invars)), inputs_of, lambda constant: None)


def is_elementwise(body: Subprogram, shape: tuple[int, ...]) -> bool:
    """Whether a program on scalars and on arrays of a shape computes element by element."""
    if not set(_shapes([*body.jaxpr.constvars, *body.jaxpr.invars])) <= {(), shape}:
        return False
    return all(is_elementwise_operation(operation, shape) for operation in body.operations)


def is_elementwise_operation(operation: Operation, shape: tuple[int, ...]) -> bool:
    if operation.kind == "call":
        return is_elementwise(operation.bodies[0], shape)
    shapes = _shapes((*operation.eqn.invars, *operation.eqn.outvars))
    if operation.name == "broadcast_in_dim":
        return shapes[0] == () and shapes[-1] in ((), shape)
    return operation.name in ELEMENTWISE and set(shapes) <= {(), shape}


def evaluate_on_slices(
    body: Subprogram, values: Sequence[Any], shape: tuple[int, ...]
) -> list[Any]:
    """Evaluate an elementwise program on slices of its arrays, which have this shape."""

    def apply_to_slices(operation: Operation, values: list[Any]) -> list[Any]:
        eqn = operation.eqn
        if operation.kind == "call":
            return evaluate_on_slices(operation.bodies[0], values, shape)
        if operation.name == "broadcast_in_dim" and eqn.params["shape"]:
            # The program has the shape of the whole array as a constant.
            eqn = eqn.replace(params={**eqn.params, "shape": shape})
        return apply(dataclasses.replace(operation, eqn=eqn), values)

    return evaluate(body, values, apply_to_slices)


def trace_inlined(fn: Callable[..., Any], platform: str, *args: Any) -> tuple[Subprogram, Any]:
    """Trace a function for a platform; return its inlined program and its results' shapes."""

    def inline(operation: Operation, values: list[Any]) -> Sequence[Any]:
        if operation.name == "platform_index":
            matches = [
                names is None or platform in names for names in operation.eqn.params["platforms"]
            ]
            return [np.int32(matches.index(True))]
        # The index from `platform_index` is a number; a user's condition is traced.
        if operation.kind == "cond" and isinstance(values[0], np.generic):
            return evaluate(operation.bodies[int(values[0])], values[1:], inline)
        if operation.kind == "call":
            return evaluate(operation.bodies[0], values, inline)
        return apply(operation, values)

    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    inlined = jax.make_jaxpr(lambda *values: evaluate(body_of(traced), values, inline))(*args)
    return body_of(inlined), shapes


def is_slow_in_loops(jaxpr: object) -> bool:
    if jax.default_backend() != "cpu":
        return False
    return any(_name(eqn) in SLOW_IN_LOOPS for *_, eqn in all_equations(jaxpr))


def named_axes(program: object) -> set[str]:
    axes: set[Any] = set()
    for *_, eqn in all_equations(program):
        params = eqn.params
        axes.update(_manual_axes(params) or ())
        axes.update(mesh_axes_of(params.get("axis_name")), mesh_axes_of(params.get("axes")))
        for value in params.values():
            if isinstance(value, NamedSharding):
                axes.update(*map(mesh_axes_of, dims_of(value.spec)))
    # The axes of arrays are numbers.
    return {name for name in axes if isinstance(name, str)}


def is_annotated(traced: object) -> bool:
    """Whether what a program differentiates has constraints, `shard_map` or Explicit axes."""
    return any(
        _shards(eqns[-1]) and any(map(is_differentiated, eqns)) for eqns in all_equations(traced)
    )


def shards_arrays(traced: object) -> bool:
    return any(_shards(eqn) for *_, eqn in all_equations(traced))


def _shards(eqn: Any) -> bool:
    if _name(eqn) == "shard_map" or any(map(_is_explicit, eqn.outvars)):
        return True
    if _name(eqn) not in _PLACING:
        return False
    return any(
        isinstance(value, Sharding) and not value.is_fully_replicated
        for value in eqn.params.values()
    )


def _is_explicit(var: Any) -> bool:
    # Only types on Explicit axes have a sharding.
    spec = getattr(getattr(var.aval, "sharding", None), "spec", None)
    return spec is not None and any(axis is not None for axis in dims_of(spec))


# Hashes of traced functions, equal in every process and on every machine.
#
# Variables are numbered in the order in which they appear. Names, source positions, memory
# addresses, and rules of differentiation that were not used are left out; constants count by value,
# host callbacks by their qualified name.

_SOURCE = {
    "name", "debug_info", "ctx_mesh", "name_and_src_info", "src_info", "source_info", "origin",
    "jvp_jaxpr_fun", "jvp", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd", "callback_id",
    "call_id",
}  # fmt: skip
"""Parameters of operations that describe the source of a program or its derivatives."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FILE = re.compile(r"[^\s'\"<>()\[\],=]*\.py\b(?::\d+)*")


def program_hash(closed: Any) -> str:
    return _Hasher().program(closed)


def find_difference(a: Any, b: Any) -> tuple[Any, ...]:
    """Return the first operation of `a` that differs from its counterpart in `b`; () if none does.

    The enclosing operations come before it.
    """
    return _find_difference(a, b, set())


def _find_difference(a: Any, b: Any, different_inputs: set[int]) -> tuple[Any, ...]:
    hasher = _Hasher()
    jaxpr_a = getattr(a, "jaxpr", a)
    jaxpr_b = getattr(b, "jaxpr", b)
    consts = zip(
        jaxpr_a.constvars, getattr(a, "consts", ()), getattr(b, "consts", ()), strict=False
    )
    different = {var for var, x, y in consts if hasher.text(x) != hasher.text(y)}
    different |= {var for i, var in enumerate(jaxpr_a.invars) if i in different_inputs}
    for eqn_a, eqn_b in zip(jaxpr_a.eqns, jaxpr_b.eqns, strict=False):
        # Another operation was added or removed here, and all that follow differ.
        if _name(eqn_a) != _name(eqn_b) or len(eqn_a.invars) != len(eqn_b.invars):
            return (eqn_a,)
        changed: set[int] = set()
        for i, (x, y) in enumerate(zip(eqn_a.invars, eqn_b.invars, strict=True)):
            if not isinstance(x, core.Literal):
                is_changed = x in different
            elif not isinstance(y, core.Literal):
                is_changed = True
            else:
                is_changed = hasher.text(x.val) != hasher.text(y.val)
            if is_changed:
                changed.add(i)
        programs = zip(_programs_with_consts(eqn_a), _programs_with_consts(eqn_b), strict=False)
        for inner_a, inner_b in programs:
            # A while or a cond passes only some of its inputs to each of its programs.
            has_same_inputs = len(getattr(inner_a, "jaxpr", inner_a).invars) == len(eqn_a.invars)
            inner = _find_difference(inner_a, inner_b, changed if has_same_inputs else set())
            if inner:
                return eqn_a, *inner
        if changed:
            return (eqn_a,)
    return ()


def hash_strings(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"jstep")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


class _Hasher:
    """Makes texts of programs, parameters and constants; hashes a repeated program once."""

    def __init__(self) -> None:
        # By the id of a program, which the outermost one keeps alive.
        self._hashes: dict[int, str] = {}

    def program(self, closed: Any) -> str:
        if id(closed) not in self._hashes:
            self._hashes[id(closed)] = hash_strings(*self._parts(closed))
        return self._hashes[id(closed)]

    def _parts(self, closed: Any) -> list[str]:
        jaxpr = getattr(closed, "jaxpr", closed)
        numbers: dict[Any, int] = {}

        def bind(variables: Sequence[Any]) -> str:
            first = len(numbers)
            numbers.update((variable, first + i) for i, variable in enumerate(variables))
            return " ".join(_type_text(variable.aval) for variable in variables)

        def use(atoms: Sequence[Any]) -> str:
            texts: list[str] = []
            for atom in atoms:
                if isinstance(atom, core.Literal):
                    texts.append(f"{_type_text(atom.aval)}={self.text(atom.val)}")
                else:
                    texts.append(str(numbers[atom]))
            return " ".join(texts)

        parts = [bind(jaxpr.constvars), bind(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            fields = [
                f"{name}={self.text(eqn.params[name])}"
                for name in sorted(eqn.params)
                if name not in _SOURCE
            ]
            parts += [_name(eqn), use(eqn.invars), ", ".join(fields), bind(eqn.outvars)]
        parts.append(use(jaxpr.outvars))
        parts += map(self.text, getattr(closed, "consts", ()))
        return parts

    def text(self, x: object) -> str:
        if isinstance(x, core.Jaxpr | core.ClosedJaxpr):
            return self.program(x)
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            return _array_text(x)
        if isinstance(x, Mapping | set | frozenset):
            # Sorted: the order of a set depends on the process.
            texts = sorted(map(self.text, x.items() if isinstance(x, Mapping) else x))
            return f"{{{', '.join(texts)}}}"
        if isinstance(x, tuple | list):
            return f"({', '.join(map(self.text, x))})"
        if isinstance(x, Mesh | AbstractMesh):  # the repr of one has devices, of the other none
            return f"mesh({mesh_text(x)})"
        if isinstance(x, Sharding):
            return sharding_text(x)
        return strip_addresses(repr(x))


def strip_addresses(text: str) -> str:
    """Remove addresses and names of source files, which differ between processes and machines."""
    return _FILE.sub("*.py", _ADDRESS.sub("0x", text))


@functools.lru_cache(1024)  # few types, many variables
def _type_text(aval: object) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return weak + strip_addresses(str(aval))


def _array_text(x: Any) -> str:
    if isinstance(x, jax.Array):
        if is_key(x):
            return f"{x.dtype} {_array_text(jax.random.key_data(x))}"
        if not x.is_fully_addressable:  # its values are on other hosts
            return f"{x.dtype}{list(x.shape)} of several processes"
    with internal_transfers():
        array = np.asarray(x)
    digest = hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
    return f"{array.dtype}{list(array.shape)} {digest}"


# The arithmetic of one operation, and its number format.

UNCOUNTED = frozenset(["pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call"])
"""Operations whose work is unknown: functions of the host, and of other libraries."""


def uncounted_work(eqn: Any) -> set[str]:
    """Return the names of the operations in an operation whose work is unknown."""
    name = _name(eqn)
    if name in UNCOUNTED:
        return {name}
    if name == "pallas_call":
        return {name} if eqn.params.get("cost_estimate") is None else set()
    # The programs of other opaque operations, such as a linear solve.
    names: set[str] = set()
    for program in programs_in(eqn):
        for inner in program.eqns:
            names |= uncounted_work(inner)
    return names


# fmt: off
FACTORIZATIONS = frozenset([
    "triangular_solve", "tridiagonal_solve", "cholesky", "lu", "qr", "householder_product", "eigh",
    "eig", "schur", "svd", "hessenberg", "tridiagonal",
])
# fmt: on
"""Operations that a library computes: XLA sees calls, whose work it does not know."""


def factorization_flops(eqn: Any) -> dict[str, float]:
    """Return the FLOPs of the factorizations and solves in an operation, by name.

    Leading terms of the usual algorithms (Golub and Van Loan, "Matrix Computations", 4th edition),
    m ≥ n, for k right sides. Those of iterative ones (eigh, eig, schur, svd) depend on the values.
    """
    name = _name(eqn)
    if name not in FACTORIZATIONS:
        flops: dict[str, float] = {}
        for program in programs_in(eqn):
            for inner in program.eqns:
                for kind, count in factorization_flops(inner).items():
                    flops[kind] = flops.get(kind, 0) + count
        return flops
    if name == "tridiagonal_solve":
        return {name: 8.0 * math.prod(eqn.invars[-1].aval.shape)}
    aval = eqn.invars[0].aval
    batch = math.prod(aval.shape[:-2])
    if aval.ndim > 1:
        n, m = sorted(aval.shape[-2:])
    else:
        n = 1
        m = aval.shape[0]
    qr = 2 * m * n**2 - 2 / 3 * n**3
    svd = 2 * m * n**2 + 2 * n**3
    if eqn.params.get("compute_uv", True):
        svd = 6 * m * n**2 + 20 * n**3
    counts = {
        "triangular_solve": math.prod(eqn.invars[-1].aval.shape[-2:]) * n,
        "cholesky": n**3 / 3,
        "lu": m * n**2 - n**3 / 3,
        "qr": 2 * qr,  # R, and then Q
        "householder_product": qr,
        "eigh": 9 * n**3,
        "eig": 25 * n**3,
        "schur": 25 * n**3,
        "svd": svd,
        "hessenberg": 10 / 3 * n**3,
        "tridiagonal": 4 / 3 * n**3,
    }
    real_flops = 4 if np.issubdtype(aval.dtype, np.complexfloating) else 1
    return {name: float(batch * counts[name] * real_flops)}


def loops_in(eqn: Any) -> int:
    """Return the number of loops of unknown length in the programs of an opaque operation."""
    count = 0
    for program in programs_in(eqn):
        count += sum(_name(inner) == "while" for *_, inner in all_equations(program))
    return count


_FREE = MOVES | {"gather", "convert_element_type", "bitcast_convert_type"}

_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}


class Product(NamedTuple):
    """The wider operand dtype of a matrix product or convolution, and its products' precision."""

    dtype: str
    precision: str


def count_flops(eqn: Any) -> float:
    """Return the floating-point operations of an operation that has no body."""
    name = _name(eqn)
    params = eqn.params
    size = sum(map(_size, eqn.outvars))
    if name in ("dot_general", "ragged_dot_general"):
        products, groups = _products_and_groups(eqn)
        return 2.0 * size * products / groups
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    if name == "conv_general_dilated":
        # Each result is a sum over the kernel of one output feature.
        kernel = eqn.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * size * math.prod(kernel) / features
    if name in _FREE:
        return 0.0
    if name.startswith(("reduce_", "arg", "cum")):
        return float(_size(eqn.invars[0])) if eqn.invars else 0.0
    return float(size)


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _products_and_groups(eqn: Any) -> tuple[int, int]:
    """Return the size of a matrix product's contracted axes, and the number of their groups."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contracted, _), _ = numbers
    products = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if ragged is None or set(ragged.lhs_ragged_dimensions).isdisjoint(contracted):
        return products, 1
    # The groups are along a contracted axis: each result uses only the rows of one group.
    return products, eqn.invars[2].aval.shape[-1]


def matrix_product(eqn: Any) -> Product | None:
    if _name(eqn) not in _PRODUCTS:
        return None
    dtype = max((var.aval.dtype for var in eqn.invars[:2]), key=lambda item: item.itemsize)
    precision = eqn.params["precision"]
    kind = jax.lax.Precision
    if isinstance(precision, tuple) and all(isinstance(item, kind) for item in precision):
        precision = max(precision, key=lambda item: int(item.value))
    name = "DEFAULT" if precision is None else str(getattr(precision, "name", precision))
    return Product(dtype.name, "ANY_F8" if name.startswith("ANY_F8") else name)
