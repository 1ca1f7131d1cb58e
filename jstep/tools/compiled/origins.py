"""Tracing values of a compiled program back to its arguments."""

import re

from jstep.tools.compiled.loops import CALLS, SAME, Frame
from jstep.tools.compiled.program import Instruction

_PARTS = SAME | {"transpose", "slice", "dynamic-slice"}
_INDEX = re.compile(r"index=(\d+)")


def argument_of(frame: Frame, name: str, index: int | None = None) -> int | None:
    """Return the number of the argument that an instruction's result is a part of; None if the result is computed.

    Converted, sliced and transposed arguments are parts. So are elements of a loop's carry that no iteration changes.
    """
    one = frame.computation.instructions.get(name)
    if one is None:
        return None
    if one.opcode == "tuple" and index is not None and index < len(one.operands):
        return argument_of(frame, one.operands[index])
    if one.opcode == "get-tuple-element" and index is None and (found := _INDEX.search(one.attributes)):
        return argument_of(frame, one.operands[0], int(found[1]))
    if one.opcode in _PARTS and one.operands:
        return argument_of(frame, one.operands[0], index)
    if one.opcode == "while":
        return _carried(frame, one, index)
    if one.opcode in CALLS:
        inner = frame.inner(one, CALLS[one.opcode])
        return argument_of(inner[0], inner[0].computation.root, index) if inner else None
    if one.opcode == "parameter":
        return _given(frame, one, index)
    return None


def _given(frame: Frame, parameter: Instruction, index: int | None) -> int | None:
    number = int(parameter.argument) if parameter.argument.isdigit() else -1
    if frame.caller is None or frame.call is None:
        return number if number >= 0 and index is None else None
    if frame.call.opcode == "while":
        return _carried(frame.caller, frame.call, index)
    if frame.call.opcode in CALLS and 0 <= number < len(frame.call.operands):
        return argument_of(frame.caller, frame.call.operands[number], index)
    return None


def _carried(frame: Frame, loop: Instruction, index: int | None) -> int | None:
    """Return the argument in one place of a loop's carry, if no iteration changes it."""
    body = frame.inner(loop, "body")
    if not body or not _keeps(body[0], body[0].computation.root, index, index):
        return None
    return argument_of(frame, loop.operands[0], index)


def _keeps(body: Frame, name: str, index: int | None, place: int | None) -> bool:
    """Whether an instruction of a loop's body returns one place of the carry unchanged."""
    one = body.computation.instructions.get(name)
    if one is None:
        return False
    if one.opcode == "parameter":
        return index == place
    if one.opcode == "tuple" and index is not None and index < len(one.operands):
        return _keeps(body, one.operands[index], None, place)
    if one.opcode == "get-tuple-element" and index is None and (found := _INDEX.search(one.attributes)):
        return _keeps(body, one.operands[0], int(found[1]), place)
    if one.opcode in SAME and one.operands:
        return _keeps(body, one.operands[0], index, place)
    if one.opcode == "while" and one.operands:
        inner = body.inner(one, "body")
        kept = bool(inner) and _keeps(inner[0], inner[0].computation.root, index, index)
        return kept and _keeps(body, one.operands[0], index, place)
    return False
