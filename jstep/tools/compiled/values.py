"""Values of a compiled program: which argument one is a part of, how often a loop runs, and which instructions run."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from jstep.tools.compiled.program import Computation, Instruction, Program

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=(\w\w)")
_INDEX = re.compile(r"index=(\d+)")
_INTEGER = re.compile(r"-?\d+")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
_SAME = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier"}
"""Opcodes whose result has the value of the operand."""
_PARTS = _SAME | {"transpose", "slice", "dynamic-slice"}
_CALLS = {
    "fusion": "calls",
    "call": "to_apply",
    "async-start": "calls",
    "call-start": "to_apply",
    "fusion-start": "calls",
}
"""Opcodes that run one computation once → the attribute that names it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A computation together with the instruction that calls it.

    Attributes:
        program: The program.
        computation: The computation.
        caller: The frame of the calling instruction; None for the entry.
        call: The calling instruction; None for the entry.
    """

    program: Program
    computation: Computation
    caller: "Frame | None" = None
    call: Instruction | None = None

    def inner(self, call: Instruction, *roles: str) -> "list[Frame]":
        """Return the frames of the computations that an instruction calls in some roles (by default all), in order."""
        found = (self.program.computations.get(name) for role, name in call.called if role in roles or not roles)
        return [Frame(self.program, computation, self, call) for computation in found if computation is not None]


class _Definition(NamedTuple):
    """The instruction that defines a value, and the place of the value in its result if that is a tuple."""

    frame: Frame
    instruction: Instruction
    place: int | None


class _Element(NamedTuple):
    """One element of the carry of a loop; `place` is None if the carry is a single array."""

    frame: Frame
    loop: Instruction
    place: int | None


class _Value(NamedTuple):
    """An integer, or the sum of an integer and an element of a loop's carry in the current iteration."""

    element: _Element | None
    offset: int


def _resolve(frame: Frame, name: str, index: int | None = None, same: Set[str] = _SAME) -> _Definition | None:
    """Return the definition of a value, through tuples, calls, and opcodes whose result is the `same` value.

    It is never a copy, but may be a loop, or a parameter of the program or of a loop.
    """
    while (one := frame.computation.instructions.get(name)) is not None:
        if one.opcode == "tuple" and index is not None and index < len(one.operands):
            name, index = one.operands[index], None
        elif one.opcode == "get-tuple-element" and index is None and (found := _INDEX.search(one.attributes)):
            name, index = one.operands[0], int(found[1])
        elif one.opcode in same and one.operands:
            name = one.operands[0]
        elif one.opcode in _CALLS:
            inner = frame.inner(one, _CALLS[one.opcode])
            if not inner:
                return None
            frame, name = inner[0], inner[0].computation.root
        elif one.opcode == "parameter" and frame.caller and frame.call and frame.call.opcode in _CALLS:
            operands, number = frame.call.operands, _number(one)
            if number is None or number >= len(operands):
                return None
            frame, name = frame.caller, operands[number]
        else:
            return _Definition(frame, one, index)
    return None


def _number(parameter: Instruction) -> int | None:
    return int(parameter.argument) if parameter.argument.isdigit() else None


def _element(definition: _Definition) -> _Element | None:
    """Return the element of a loop's carry that a value is, in an iteration or after the loop."""
    frame, one, place = definition
    if one.opcode == "while":
        return _Element(frame, one, place)
    if one.opcode == "parameter" and frame.caller and frame.call and frame.call.opcode == "while":
        return _Element(frame.caller, frame.call, place)
    return None


def argument_of(frame: Frame, name: str, index: int | None = None) -> int | None:
    """Return the number of the argument that an instruction's result is a part of; None if the result is computed.

    Converted, sliced and transposed arguments are parts. So are elements of a loop's carry that no iteration changes.
    """
    found = _resolve(frame, name, index, _PARTS)
    if found is None:
        return None
    element = _element(found)
    if element is not None:
        unchanged = _step(element) == 0
        return argument_of(element.frame, element.loop.operands[0], element.place) if unchanged else None
    is_argument = found.instruction.opcode == "parameter" and found.frame.caller is None and found.place is None
    return _number(found.instruction) if is_argument else None


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Return how often a `while` runs its body; None if that depends on values.

    The compilers for CPUs and GPUs print it. Otherwise it is derived from the counter: its start, its increment, and
    the bound that the condition compares it with.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition = frame.inner(loop, "condition")
    found = _resolve(condition[0], condition[0].computation.root) if condition else None
    if found is None or found.instruction.opcode != "compare":
        return None
    compare = found.instruction
    left, right = (_value(found.frame, name) for name in compare.operands[:2])
    direction = _DIRECTION.search(compare.attributes)
    if left is None or right is None or direction is None:
        return None
    for counter, limit, way in ((left, right, direction[1]), (right, left, _MIRRORED[direction[1]])):
        end = _constant(limit)
        if end is None or counter.element is None or counter.element.loop is not loop:
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
    """Return the value of an integer, or of an element of a tuple; None if unknown."""
    found = _resolve(frame, name, index)
    if found is None:
        return None
    one = found.instruction
    if one.opcode == "constant":
        return _Value(None, int(one.argument)) if _INTEGER.fullmatch(one.argument) else None
    if one.opcode in ("add", "subtract") and len(one.operands) == 2:
        left, right = (_value(found.frame, operand) for operand in one.operands)
        return _sum(left, right, -1 if one.opcode == "subtract" else 1)
    element = _element(found)
    if element is None:
        return None
    if one.opcode == "parameter":
        return _Value(element, 0)
    return _begin(element) if _step(element) == 0 else None


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None or (right.element is not None and (left.element is not None or sign < 0)):
        return None
    return _Value(left.element or right.element, left.offset + sign * right.offset)


def _begin(element: _Element) -> _Value | None:
    return _value(element.frame, element.loop.operands[0], element.place)


def _step(element: _Element) -> int | None:
    """Return the increment of an element per iteration; None if it changes otherwise."""
    body = element.frame.inner(element.loop, "body")
    following = _value(body[0], body[0].computation.root, element.place) if body else None
    if following is None or following.element is None:
        return None
    same = following.element.loop is element.loop and following.element.place == element.place
    return following.offset if same else None


def _constant(value: _Value | None) -> int | None:
    """Return the integer if no iteration changes it."""
    if value is None or value.element is None:
        return None if value is None else value.offset
    begin = _constant(_begin(value.element)) if _step(value.element) == 0 else None
    return None if begin is None else begin + value.offset


def containing(program: Program, wanted: Callable[[Instruction], bool]) -> set[str]:
    """Return the computations that contain a wanted instruction, directly or through calls."""
    called = {
        name: {inner for one in computation.instructions.values() for _, inner in one.called}
        for name, computation in program.computations.items()
    }
    reached = {
        name
        for name, computation in program.computations.items()
        if any(map(wanted, computation.instructions.values()))
    }
    while more := {name for name, inner in called.items() if name not in reached and inner & reached}:
        reached |= more
    return reached


def instructions_of(program: Program, wanted: Callable[[Instruction], bool]) -> Iterator[tuple[Frame, Instruction]]:
    """Iterate over the wanted instructions, once for each call of their computation."""
    entry = program.computations.get(program.entry)
    if entry is not None:
        yield from _instructions(Frame(program, entry), wanted, containing(program, wanted))


def _instructions(
    frame: Frame, wanted: Callable[[Instruction], bool], reached: set[str]
) -> Iterator[tuple[Frame, Instruction]]:
    if frame.computation.name not in reached:
        return
    for one in frame.computation.instructions.values():
        if wanted(one):
            yield frame, one
        for inner in frame.inner(one):
            yield from _instructions(inner, wanted, reached)
