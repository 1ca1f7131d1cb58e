"""Compiled programs: their computations and instructions, and the values that control their loops."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias

# Parser of compiled programs: computations, instructions, and the types of their results.

_TOKEN = re.compile(r"(?P<open>\()|(?P<close>\))|(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^{}]*)\})?")
_PACKED = re.compile(r"E\((\d+)\)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_ASSIGNED = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_REMATERIALIZED = re.compile(r"\.remat(?:\d|_compressed|_uncompressed|\.|$)")
"""Names of rematerialized instructions: "fusion.3.remat", "fusion.3.remat2.1".

Operations of `jax.checkpoint` have such words in their metadata, not after a dot in their names.
"""


class Array(NamedTuple):
    """The type of an array; its `bits` per element are 0 for types without data (`token`, `opaque`)."""

    dims: tuple[int, ...]
    bits: int


Shape: TypeAlias = "Array | tuple[Shape, ...]"


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction.

    `argument` is the text in its parentheses: operands, a constant, or the number of a parameter; `attributes` follow.
    """

    name: str
    opcode: str
    type_text: str
    argument: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def shape(self) -> Shape:
        return parse_shape(self.type_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.argument))

    @functools.cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """The computations that it calls, as (role, name); the end of an asynchronous call has none."""
        if self.opcode.endswith(("-update", "-done")):
            return ()
        calls = _CALLED.findall(_QUOTED.sub('""', self.attributes))
        return tuple((role, name) for role, names in calls for name in _NAME.findall(names))

    @functools.cached_property
    def op_name(self) -> str:
        """The operation of the traced program; empty if unknown."""
        return quoted_value(self.attributes, "op_name")


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in printed order; `root` returns the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        by_name: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                by_name.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in by_name.items()}


class CompiledProgram(NamedTuple):
    """A compiled program; `header` is its first line."""

    computations: Mapping[str, Computation]
    entry: Computation
    header: str


def parse_program(text: str) -> CompiledProgram:
    """Parse a printed program; lines that cannot be parsed are skipped."""
    computations: dict[str, Computation] = {}
    entry = name = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            instruction = _instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
        elif not line.startswith("HloModule") and (head := _HEAD.match(line)):
            name, instructions = head[2], {}
            entry = name if head[1] else entry
        elif line.startswith("}") and name:
            root = next((candidate.name for candidate in instructions.values() if candidate.is_root), "")
            computations[name] = Computation(name, instructions, root)
            name = ""
    return CompiledProgram(computations, computations.get(entry, Computation("", {}, "")), text.partition("\n")[0])


def program_recomputes(program: CompiledProgram) -> bool:
    """Whether the compiler rematerialized results to fit the program into memory; `jax.checkpoint` does not count."""
    names = (name for computation in program.computations.values() for name in computation.instructions)
    return any(map(_REMATERIALIZED.search, names))


def quoted_value(attributes: str, key: str) -> str:
    """Return the value of `key="value"`, or ""."""
    match = re.search(rf'\b{re.escape(key)}="((?:[^"\\]|\\.)*)"', attributes)
    return re.sub(r"\\(.)", r"\1", match[1]) if match else ""


def _instruction(line: str) -> Instruction | None:
    start = _ASSIGNED.match(line)
    if start is None:
        return None
    at = start.end()
    after = _closing(line, at) if line.startswith("(", at) else line.find(" ", at)
    opcode = _OPCODE.match(line, after) if after > 0 else None
    if opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    argument = line[opcode.end() : end - 1]
    return Instruction(start[2], opcode[1], line[at:after], argument, line[end:], bool(start[1]))


_PARENTHESIS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')


def _closing(line: str, at: int) -> int:
    depth = 0
    for match in _PARENTHESIS.finditer(line, at):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(line)


def parse_shape(text: str) -> Shape:
    """Parse a printed type. Of the layout, only the packing of elements is used.

    Example:
        >>> from jstep.tools.compiled import parse_shape, shape_bytes
        >>> shape_bytes(parse_shape("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, u32[])"))
        16
    """
    stack: list[list[Shape]] = [[]]
    for token in _TOKEN.finditer(text):
        if token["open"]:
            stack.append([])
        elif token["close"]:
            if len(stack) > 1:
                inner = tuple(stack.pop())
                stack[-1].append(inner)
        else:
            dims = tuple(int(length) for length in token["dims"].replace("<=", "").split(",") if length)
            stack[-1].append(Array(dims, _bits(token["dtype"], token["layout"] or "")))
    return stack[0][0] if len(stack[0]) == 1 else tuple(stack[0])


def shape_bytes(shape: Shape) -> int:
    if isinstance(shape, Array):
        return -(-math.prod(shape.dims) * shape.bits // 8)
    return sum(shape_bytes(inner) for inner in shape)


def _bits(dtype: str, layout: str) -> int:
    """Bits per element: at least 8 unless the layout packs them."""
    packed = _PACKED.search(layout)
    if packed:
        return int(packed[1])
    digits = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else max(8, int(digits[0])) if digits else 0


# Values of a compiled program: which argument one is a part of, how often a loop runs, and which instructions run.

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=(\w\w)")
_INDEX = re.compile(r"index=(\d+)")
_INTEGER = re.compile(r"-?\d+")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_SAME = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier"}
"""Opcodes whose result has the value of the operand."""
_PARTS = _SAME | {"transpose", "slice", "dynamic-slice"}
_CALLS = {"fusion", "call", "async-start", "call-start", "fusion-start"}
"""Opcodes that call only one computation, which runs once."""


class Frame(NamedTuple):
    """A computation together with the instruction that calls it."""

    program: CompiledProgram
    computation: Computation
    caller: "Frame | None" = None
    call: Instruction | None = None

    def inner(self, call: Instruction, *roles: str) -> "list[Frame]":
        """The frames of the computations that an instruction calls, in some roles or all."""
        computations = (self.program.computations.get(name) for role, name in call.called if role in roles or not roles)
        return [Frame(self.program, computation, self, call) for computation in computations if computation is not None]


class _Place(NamedTuple):
    """A result of an instruction, or the element `place` of the carry of a loop."""

    frame: Frame
    instruction: Instruction
    place: int | None


class _Value(NamedTuple):
    """An integer, or its sum with an element of a loop's carry in the current iteration."""

    element: _Place | None
    offset: int


def _resolve(frame: Frame, name: str, index: int | None = None, same: Set[str] = _SAME) -> _Place | None:
    """Return the definition of a value, through tuples, calls, and opcodes with the `same` value; never a copy."""
    while (instruction := frame.computation.instructions.get(name)) is not None:
        if instruction.opcode == "tuple" and index is not None and index < len(instruction.operands):
            name, index = instruction.operands[index], None
        elif (
            instruction.opcode == "get-tuple-element"
            and index is None
            and (match := _INDEX.search(instruction.attributes))
        ):
            name, index = instruction.operands[0], int(match[1])
        elif instruction.opcode in same and instruction.operands:
            name = instruction.operands[0]
        elif instruction.opcode in _CALLS:
            inner = frame.inner(instruction)
            if not inner:
                return None
            frame, name = inner[0], inner[0].computation.root
        elif instruction.opcode == "parameter" and frame.caller and frame.call and frame.call.opcode in _CALLS:
            name, frame = frame.call.operands[int(instruction.argument)], frame.caller
        else:
            return _Place(frame, instruction, index)  # may be a loop, or a parameter of the program or of a loop
    return None


def _element(definition: _Place) -> _Place | None:
    """The element of a loop's carry that a value is, if any."""
    frame, instruction, place = definition
    if instruction.opcode == "while":
        return definition
    if instruction.opcode == "parameter" and frame.caller and frame.call and frame.call.opcode == "while":
        return _Place(frame.caller, frame.call, place)
    return None


def argument_number(frame: Frame, name: str, index: int | None = None) -> int | None:
    """Return the number of the argument that an instruction's result is a part of; None if the result is computed.

    Parts may be converted, sliced or transposed, or carried unchanged by a loop.
    """
    definition = _resolve(frame, name, index, _PARTS)
    if definition is None:
        return None
    element = _element(definition)
    if element is not None:
        unchanged = _step(element) == 0
        return argument_number(element.frame, element.instruction.operands[0], element.place) if unchanged else None
    is_argument = (
        definition.instruction.opcode == "parameter" and definition.frame.caller is None and definition.place is None
    )
    return int(definition.instruction.argument) if is_argument else None


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Return how often a `while` runs its body; None if that depends on values."""
    # The compilers for CPUs and GPUs print the number. Otherwise it follows from the counter's start, its increment,
    # and the bound that the condition compares it with.
    printed = _KNOWN.search(loop.attributes)
    if printed:
        return int(printed[1])
    condition = frame.inner(loop, "condition")
    definition = _resolve(condition[0], condition[0].computation.root) if condition else None
    if definition is None or definition.instruction.opcode != "compare":
        return None
    compare = definition.instruction
    left, right = (_value(definition.frame, name) for name in compare.operands[:2])
    direction = _DIRECTION.search(compare.attributes)
    if left is None or right is None or direction is None:
        return None
    for counter, limit, way in ((left, right, direction[1]), (right, left, _MIRRORED[direction[1]])):
        end = _constant(limit)
        if end is None or counter.element is None or counter.element.instruction is not loop:
            continue
        start, step = _constant(_begin(counter.element)), _step(counter.element)
        if start is not None and step is not None:
            return _count(start + counter.offset, end, step, way)
    return None


def _count(start: int, end: int, step: int, way: str) -> int | None:
    if way in ("GT", "GE"):
        start, end, step, way = -start, -end, -step, _MIRRORED[way]
    if way == "LE":
        end, way = end + 1, "LT"
    if way == "LT":
        return 0 if start >= end else -((start - end) // step) if step > 0 else None
    if way == "NE" and step and (end - start) % step == 0 and (end - start) // step >= 0:
        return (end - start) // step
    return None


def _value(frame: Frame, name: str, index: int | None = None) -> _Value | None:
    definition = _resolve(frame, name, index)
    if definition is None:
        return None
    instruction = definition.instruction
    if instruction.opcode == "constant":
        return _Value(None, int(instruction.argument)) if _INTEGER.fullmatch(instruction.argument) else None
    if instruction.opcode in ("add", "subtract") and len(instruction.operands) == 2:
        left, right = (_value(definition.frame, operand) for operand in instruction.operands)
        sign = -1 if instruction.opcode == "subtract" else 1
        if left is None or right is None or (right.element is not None and (left.element is not None or sign < 0)):
            return None
        return _Value(left.element or right.element, left.offset + sign * right.offset)
    element = _element(definition)
    if element is None:
        return None
    if instruction.opcode == "parameter":
        return _Value(element, 0)
    return _begin(element) if _step(element) == 0 else None


def _begin(element: _Place) -> _Value | None:
    return _value(element.frame, element.instruction.operands[0], element.place)


def _step(element: _Place) -> int | None:
    """The increment of an element per iteration; None if it changes otherwise."""
    body = element.frame.inner(element.instruction, "body")
    following = _value(body[0], body[0].computation.root, element.place) if body else None
    if following is None or following.element is None:
        return None
    _, loop, place = following.element
    return following.offset if loop is element.instruction and place == element.place else None


def _constant(value: _Value | None) -> int | None:
    """The integer, if no iteration changes it."""
    if value is None or value.element is None:
        return None if value is None else value.offset
    begin = _constant(_begin(value.element)) if _step(value.element) == 0 else None
    return None if begin is None else begin + value.offset


def instructions_within(frame: Frame) -> Iterator[tuple[Frame, Instruction]]:
    """Iterate over the instructions of a frame and of its calls, once per call."""
    for instruction in frame.computation.instructions.values():
        yield frame, instruction
        for inner in frame.inner(instruction):
            yield from instructions_within(inner)
