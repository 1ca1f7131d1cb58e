"""Trip counts of the loops in a compiled program."""

import dataclasses
import re
from typing import NamedTuple

from jstep.tools.compiled.program import Computation, Instruction, Program

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"direction=(\w\w)")
_INDEX = re.compile(r"index=(\d+)")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}
SAME = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier", "optimization-barrier"}
"""Opcodes whose result has the value of the operand."""
CALLS = {
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


class _Element(NamedTuple):
    """One element of the carry of a loop; `place` is None if the carry is a single array."""

    frame: Frame
    loop: Instruction
    place: int | None


class _Value(NamedTuple):
    """An integer, or the sum of an integer and an element of a loop's carry in the current iteration."""

    element: _Element | None
    offset: int


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """Return how often a `while` runs its body; None if that depends on values.

    The compilers for CPUs and GPUs print it. Otherwise it is derived from the counter: its start, its increment, and
    the bound that the condition compares it with.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition = frame.inner(loop, "condition")
    compared = _compare(condition[0], condition[0].computation.root) if condition else None
    if compared is None:
        return None
    place, compare = compared
    left, right = (_value(place, name, None) for name in compare.operands[:2])
    direction = _DIRECTION.search(compare.attributes)
    if left is None or right is None or direction is None:
        return None
    for counter, limit, way in ((left, right, direction[1]), (right, left, _MIRRORED[direction[1]])):
        end = _constant(limit)
        if end is None or counter.element is None or counter.element.loop is not loop:
            continue
        start, step = _start(counter.element), _step(counter.element)
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


def _compare(frame: Frame, name: str) -> tuple[Frame, Instruction] | None:
    """Return the comparison whose result an instruction returns."""
    one = frame.computation.instructions.get(name)
    if one is None:
        return None
    if one.opcode == "compare":
        return frame, one
    if one.opcode in SAME and one.operands:
        return _compare(frame, one.operands[0])
    if one.opcode in CALLS:
        inner = frame.inner(one, CALLS[one.opcode])
        return _compare(inner[0], inner[0].computation.root) if inner else None
    return None


def _value(frame: Frame, name: str, index: int | None) -> _Value | None:
    """Return the value of an integer, or of an element of a tuple; None if unknown."""
    one = frame.computation.instructions.get(name)
    if one is None:
        return None
    if one.opcode == "constant":
        return _Value(None, int(one.argument)) if re.fullmatch(r"-?\d+", one.argument) else None
    if one.opcode == "tuple" and index is not None and index < len(one.operands):
        return _value(frame, one.operands[index], None)
    if one.opcode == "get-tuple-element" and index is None and (found := _INDEX.search(one.attributes)):
        return _value(frame, one.operands[0], int(found[1]))
    if one.opcode in SAME and one.operands:
        return _value(frame, one.operands[0], index)
    if one.opcode in ("add", "subtract") and len(one.operands) == 2:
        left, right = (_value(frame, operand, None) for operand in one.operands)
        return _sum(left, right, -1 if one.opcode == "subtract" else 1)
    if one.opcode == "while":
        element = _Element(frame, one, index)
        return _begin(element) if _is_constant(element) else None
    if one.opcode in CALLS:
        inner = frame.inner(one, CALLS[one.opcode])
        return _value(inner[0], inner[0].computation.root, index) if inner else None
    if one.opcode == "parameter" and frame.caller is not None and frame.call is not None:
        return _given(frame.caller, frame.call, one, index)
    return None


def _given(caller: Frame, call: Instruction, parameter: Instruction, index: int | None) -> _Value | None:
    """Return the value of a parameter of a called computation."""
    if call.opcode == "while":
        return _Value(_Element(caller, call, index), 0)
    number = int(parameter.argument) if parameter.argument.isdigit() else len(call.operands)
    if call.opcode in CALLS and number < len(call.operands):
        return _value(caller, call.operands[number], index)
    return None


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None or (right.element is not None and (left.element is not None or sign < 0)):
        return None
    return _Value(left.element or right.element, left.offset + sign * right.offset)


def _begin(element: _Element) -> _Value | None:
    return _value(element.frame, element.loop.operands[0], element.place)


def _next(element: _Element) -> _Value | None:
    """Return the value of an element after an iteration."""
    body = element.frame.inner(element.loop, "body")
    return _value(body[0], body[0].computation.root, element.place) if body else None


def _step(element: _Element) -> int | None:
    """Return the increment of an element per iteration."""
    following = _next(element)
    if following is None or following.element is None:
        return None
    same = following.element.loop is element.loop and following.element.place == element.place
    return following.offset if same else None


def _is_constant(element: _Element) -> bool:
    return _step(element) == 0


def _constant(value: _Value | None) -> int | None:
    """Return the integer if no iteration changes it."""
    if value is None or value.element is None:
        return None if value is None else value.offset
    begin = _constant(_begin(value.element)) if _is_constant(value.element) else None
    return None if begin is None else begin + value.offset


def _start(element: _Element) -> int | None:
    return _constant(_begin(element))
