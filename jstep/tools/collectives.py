"""The collectives of a program, and how often it uses each of its arguments."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jstep.core.jaxprs import MOVES, Operation, Subprogram, body_of, evaluate, programs_in
from jstep.tools import compiled
from jstep.tools.compiled import Array, CompiledProgram, Computation, Frame, Instruction, Shape

# Collectives of a compiled program: each exchange between devices, and their sums by kind.

BETWEEN_SLICES = "between slices"
KINDS = {
    "all-reduce": None,
    "all-gather": None,
    "reduce-scatter": None,
    "all-to-all": None,
    "ragged-all-to-all": 1,
    "collective-permute": 0,
    "collective-broadcast": 1,
    BETWEEN_SLICES: None,
}
"""Kind → number of operands that hold data, if others are buffers or sizes; 0 if a device sends what it receives."""
_UNCHANGED = {"get-tuple-element", "bitcast", "copy", "convert", "reshape", "transpose", "tuple"}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


class Collective(NamedTuple):
    """The collectives of one kind in a step.

    Attributes:
        number: How many run per step; collectives in loops count as often as they run.
        bytes: Bytes that a device sends or receives, the larger of the two, summed over all of them.
    """

    number: int
    bytes: int


class Exchange(NamedTuple):
    """One exchange between devices; `bytes` are sent or received, whichever is more."""

    kind: str
    bytes: int
    times: int
    frame: Frame
    instruction: Instruction

    def parts(self) -> list[tuple[str, int]]:
        """Each operand and its share of the bytes; compilers combine several exchanges into one."""
        instructions = self.frame.computation.instructions
        operands = [instructions[name] for name in self.instruction.operands if name in instructions][
            : KINDS[self.kind] or None
        ]
        total = sum(compiled.shape_bytes(operand.shape) for operand in operands)
        return [(part.name, self.bytes * compiled.shape_bytes(part.shape) // max(total, 1)) for part in operands]


def count_collectives(program: CompiledProgram) -> dict[str, Collective]:
    """Return kind → number and bytes, of all exchanges of a compiled program.

    Loops whose length depends on values count once; of a conditional, the branch that moves the most bytes counts.
    """
    numbers: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for exchange in find_exchanges(program):
        numbers[exchange.kind] += exchange.times
        moved[exchange.kind] += exchange.times * exchange.bytes
    return {kind: Collective(numbers[kind], moved[kind]) for kind in KINDS if numbers[kind]}


def find_exchanges(program: CompiledProgram) -> list[Exchange]:
    """Return all exchanges of a program, counted as in `count_collectives`."""
    computations = program.computations.values()
    # An asynchronous exchange counts once, although it has several instructions. On a TPU several copies of an
    # instruction may belong to one exchange, and one of them starts it.
    started = {
        _chain(instruction)
        for each in computations
        for instruction in each.instructions.values()
        if _is_started(each, instruction)
    }

    def within(frame: Frame, times: int) -> Iterator[Exchange]:
        for instruction in frame.computation.instructions.values():
            kind, chain = _kind(frame, instruction), _chain(instruction)
            is_continued = chain and chain in started and not _is_started(frame.computation, instruction)
            if kind is not None and not is_continued:
                yield Exchange(kind, _moved(frame.computation, instruction, kind), times, frame, instruction)
            elif instruction.opcode == "while":
                count = compiled.trip_count(frame, instruction)
                for role, often in (("body", count), ("condition", None if count is None else count + 1)):
                    for inner in frame.inner(instruction, role):
                        yield from within(inner, times * (1 if often is None else often))
            elif instruction.opcode == "conditional":
                branches = [list(within(inner, times)) for inner in frame.inner(instruction, *_BRANCHES)]
                yield from max(branches, key=lambda branch: sum(each.bytes * each.times for each in branch), default=[])
            else:
                for inner in frame.inner(instruction):
                    yield from within(inner, times)

    return list(within(Frame(program, program.entry), 1))


def _kind(frame: Frame, instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "all-reduce" and _is_scattered(frame, instruction):
        return "reduce-scatter"
    if opcode in KINDS:
        return opcode
    if opcode == "send":
        if "is_host_transfer=true" not in instruction.attributes:
            return "collective-permute"
        # Over the network between TPU slices; the collectives that it needs inside a slice count separately.
        return BETWEEN_SLICES if _rendezvous(instruction) else None
    return None


def _rendezvous(instruction: Instruction) -> str:
    """The exchange between slices that a send or receive belongs to; empty for the host."""
    if not compiled.quoted_value(instruction.attributes, "_xla_host_transfer_handler_name").startswith("xla_megascale"):
        return ""
    return compiled.quoted_value(instruction.attributes, "_xla_host_transfer_rendezvous")


def _moved(computation: Computation, instruction: Instruction, kind: str) -> int:
    if instruction.opcode == "send":
        name = _rendezvous(instruction)
        both = [other for other in computation.instructions.values() if other.opcode in ("send", "recv")]
        same = [other for other in both if other is instruction or (name and _rendezvous(other) == name)]
        return max(_payload(other.shape) for other in same)
    taken = _taken(computation, instruction)
    operands = [computation.instructions.get(name) for name in instruction.operands[: KINDS[kind]]]
    return max(taken, sum(compiled.shape_bytes(operand.shape) for operand in operands if operand is not None))


def _taken(computation: Computation, instruction: Instruction) -> int:
    """The bytes that a device receives; an asynchronous exchange receives them at its end."""
    if not instruction.opcode.endswith("-start"):
        return compiled.shape_bytes(instruction.shape)
    ends = [user for user in computation.users.get(instruction.name, ()) if user.opcode.endswith("-done")]
    return compiled.shape_bytes(ends[0].shape) if ends else _payload(instruction.shape, 1)


def _payload(shape: Shape, index: int = 0) -> int:
    if isinstance(shape, Array):
        return compiled.shape_bytes(shape)
    return compiled.shape_bytes(shape[index]) if index < len(shape) else 0


def _is_scattered(frame: Frame, instruction: Instruction) -> bool:
    """Whether a TPU runs an all-reduce as a reduce-scatter: fused with slices that are its only users."""
    if frame.call is None or frame.call.opcode != "fusion":
        return False
    users, seen = [instruction], False
    while users:
        for user in frame.computation.users.get(users.pop().name, ()):
            if user.opcode in _UNCHANGED - {"tuple"}:
                users.append(user)
            elif user.opcode == "dynamic-slice":
                seen = True
            else:
                return False
    return seen


def _chain(instruction: Instruction) -> str:
    return compiled.quoted_value(instruction.attributes, "chain_id")


def _is_started(computation: Computation, instruction: Instruction) -> bool:
    users = computation.users.get(instruction.name, ())
    return any(compiled.quoted_value(user.attributes, "custom_call_target") == "AsyncCollectiveStart" for user in users)


# Counting how often a traced program uses each of its arguments.

_PARTS = MOVES | {"convert_element_type", "bitcast_convert_type", "sharding_constraint", "reshard", "mesh_cast", "name"}
"""Operations that return a copy or a part of an operand; uses of the result are uses of the operand."""
_Sources = frozenset[int]


def count_uses(traced: object) -> list[float]:
    """Return an upper bound on how often each argument is used as a whole.

    An operation on half of an argument is half a use, as often as it runs. A loop of unknown length counts once. The
    number is infinite if uses cannot be counted.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jstep.tools.collectives import count_uses
        >>> def f(stacked, x):
        ...     return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]
        >>> count_uses(jax.make_jaxpr(f)(jnp.ones((5, 4, 4)), jnp.ones((2, 4))))[0]
        1.0
    """
    body = body_of(traced)
    sizes = [_size(var) for var in body.jaxpr.invars]
    uses = [0.0] * len(sizes)

    def run(body: Subprogram, sources: Sequence[_Sources], times: float) -> list[_Sources]:
        """Count uses; return the sources of the results."""
        return evaluate(body, sources, lambda step, taken: site(step, taken, times), lambda constant: frozenset())

    def site(operation: Operation, taken: list[_Sources], times: float) -> list[_Sources]:
        if operation.kind in ("scan", "while"):
            return loop(operation, taken, times)
        if operation.kind == "cond":
            branches = [run(body, taken[1:], times) for body in operation.bodies]
            return [frozenset().union(*results) for results in zip(*branches, strict=True)]
        if operation.kind in ("call", "shard_map"):
            return run(operation.bodies[0], taken, times)
        if operation.name in _PARTS:
            return [frozenset().union(*taken)] * len(operation.eqn.outvars)
        opaque = any(True for _ in programs_in(operation.eqn))
        for atom, origins in zip(operation.eqn.invars, taken, strict=True):
            for source in origins:
                uses[source] += math.inf if opaque else times * min(1.0, _size(atom) / max(1, sizes[source]))
        return [frozenset()] * len(operation.eqn.outvars)

    def loop(operation: Operation, taken: list[_Sources], times: float) -> list[_Sources]:
        """Iterate until the sources of the carried values no longer change."""
        body = operation.bodies[-1]
        if operation.kind == "scan":
            before, carried = operation.counts
            often = times * operation.options["length"]
        else:
            of_condition, before = operation.counts
            carried, often, taken = len(operation.eqn.outvars), times, taken[of_condition:]
        kept = list(uses)
        while True:
            uses[:] = kept
            results = run(body, taken, often)
            wider = [old | new for old, new in zip(taken[before : before + carried], results[:carried], strict=True)]
            if wider == taken[before : before + carried]:
                return results
            taken = [*taken[:before], *wider, *taken[before + carried :]]

    run(body, [frozenset([number]) for number in range(len(sizes))], 1)
    return uses


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
