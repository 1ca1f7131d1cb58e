"""Parser of compiled programs: computations, instructions, and the types of their results."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

_TOKEN = re.compile(r"(?P<open>\()|(?P<close>\))|(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^{}]*)\})?")
_PACKED = re.compile(r"E\((\d+)\)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_ASSIGNED = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_REMATERIALIZED = re.compile(r"\.remat(?:\d|_compressed|_uncompressed|\.|$)")
"""Names of rematerialized instructions: "fusion.3.remat", "fusion.3.remat2.1".

Operations of `jax.checkpoint` have such words in their metadata, not after a dot in their names.
"""


class Array(NamedTuple):
    """The type of an array.

    Attributes:
        dtype: XLA's name of the element type, such as `bf16`.
        dims: The lengths of its dimensions.
        bits: Bits per element; 0 for types without data (`token`, `opaque`).
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int


Shape: TypeAlias = "Array | tuple[Shape, ...]"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name, unique within its computation.
        opcode: The opcode, such as `all-reduce-start`.
        type_text: The type of its result, as printed.
        argument: The contents of its parentheses: operands, the value of a constant, the number of a parameter.
        attributes: The rest of the line after the parentheses.
    """

    name: str
    opcode: str
    type_text: str
    argument: str
    attributes: str

    @functools.cached_property
    def shape(self) -> Shape:
        """The type of its result."""
        return parse_shape(self.type_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands."""
        names = _NAME.findall(self.argument)
        if names or self.opcode in ("constant", "parameter"):
            return tuple(names)
        return tuple(part.split()[-1] for part in self.argument.split(",") if part.strip())

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """The computations that it calls, as (role, name); the end of an asynchronous call calls none."""
        found: list[tuple[str, str]] = []
        if ("=%" not in self.attributes and "={%" not in self.attributes) or self.opcode.endswith(("-update", "-done")):
            return ()
        for role, one, several in _CALLED.findall(_QUOTED.sub('""', self.attributes)):
            found += [(role, name) for name in ([one] if one else re.findall(r"[\w.\-]+", several))]
        return tuple(found)

    @functools.cached_property
    def op_name(self) -> str:
        """The operation of the traced program that it implements; empty if unknown."""
        return quoted(self.attributes, "op_name")


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A sequence of instructions.

    Attributes:
        name: Its name.
        instructions: Name → instruction, in printed order.
        root: The name of the instruction that returns the result of the computation.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Name → the instructions that have it as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Return the operands of an instruction that were parsed."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        computations: Name → computation.
        entry: The name of the entry computation.
        header: The first line, with the attributes of the program.
    """

    computations: Mapping[str, Computation]
    entry: str
    header: str


def parse_program(text: str) -> Program:
    """Parse a printed program. Lines that cannot be parsed are skipped."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            instruction, is_root = _instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
                root = instruction.name if is_root else root
        elif not line.startswith("HloModule") and (head := _HEAD.match(line)):
            name, root, instructions = head[2], "", {}
            entry = name if head[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, instructions, root or next(reversed(instructions), ""))
            name = ""
    return Program(computations, entry, text.partition("\n")[0])


def recomputes(program: Program) -> bool:
    """Whether the compiler rematerialized results to fit the program into memory.

    Such a program takes longer than the operations of the model suggest. Rematerialization requested by the model, with
    `jax.checkpoint`, does not count.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jstep.tools.compiled.program import parse_program, recomputes
        >>> f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
        >>> recomputes(parse_program(jax.jit(jax.grad(f)).lower(jnp.ones(8)).compile().as_text()))
        False
    """
    names = (name for computation in program.computations.values() for name in computation.instructions)
    return any(map(_REMATERIALIZED.search, names))


def quoted(attributes: str, key: str) -> str:
    """Return the value of `key="value"`, or the empty string if the key is missing."""
    found = re.search(rf'\b{re.escape(key)}="((?:[^"\\]|\\.)*)"', attributes)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


def _instruction(line: str) -> tuple[Instruction | None, bool]:
    start = _ASSIGNED.match(line)
    if start is None:
        return None, False
    at = start.end()
    after = _closing(line, at) if line.startswith("(", at) else line.find(" ", at)
    opcode = _OPCODE.match(line, after) if after > 0 else None
    if opcode is None:
        return None, False
    end = _closing(line, opcode.end() - 1)
    instruction = Instruction(start[2], opcode[1], line[at:after], line[opcode.end() : end - 1], line[end:])
    return instruction, bool(start[1])


_PARENTHESIS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')


def _closing(line: str, at: int) -> int:
    """Return the index after the parenthesis that closes the one at `at`."""
    depth = 0
    for found in _PARENTHESIS.finditer(line, at):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return len(line)


def parse_shape(text: str) -> Shape:
    """Parse a printed type. Of the layout (tiles, memory spaces), only the packing of elements is used.

    Example:
        >>> from jstep.tools.compiled.program import parse_shape, size_of
        >>> size_of(parse_shape("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, u32[])"))
        16
    """
    stack: list[list[Shape]] = [[]]
    for found in _TOKEN.finditer(text):
        if found["open"]:
            stack.append([])
        elif found["close"]:
            if len(stack) > 1:
                inner = tuple(stack.pop())
                stack[-1].append(inner)
        else:
            dims = tuple(int(length) for length in found["dims"].replace("<=", "").split(",") if length)
            stack[-1].append(Array(found["dtype"], dims, _bits(found["dtype"], found["layout"] or "")))
    return stack[0][0] if len(stack[0]) == 1 else tuple(stack[0])


def size_of(shape: Shape) -> int:
    """Return the bytes of an array, or of all arrays of a tuple."""
    if isinstance(shape, Array):
        return -(-math.prod(shape.dims) * shape.bits // 8)
    return sum(size_of(inner) for inner in shape)


def _bits(dtype: str, layout: str) -> int:
    """Return the bits per element; elements below a byte take a byte unless the layout packs them."""
    packed = _PACKED.search(layout)
    if packed:
        return int(packed[1])
    digits = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else max(8, int(digits[0])) if digits else 0
