"""Searching the instructions of a compiled program."""

from collections.abc import Callable, Iterator

from jstep.tools.compiled.program import Instruction, Program
from jstep.tools.compiled.values import Frame


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
