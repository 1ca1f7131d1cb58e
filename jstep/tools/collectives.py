"""What a compiled program moves between devices, read from its text."""

from collections import Counter
from typing import NamedTuple

from jstep.tools.compiled.exchanges import KINDS, exchanges_of
from jstep.tools.compiled.program import parse_program


class Collective(NamedTuple):
    """Exchanges of one kind.

    Attributes:
        number: How many a step makes, those in loops as often as they run.
        bytes: What they give or take on each device, the larger of the two, summed over all.
    """

    number: int
    bytes: int


def collectives_of(text: str) -> dict[str, Collective]:
    """Kind → how many and how much, from the text of a compiled program.

    Loops count as often as they run, once if that depends on values; of a conditional, the branch that moves most.
    An asynchronous exchange counts once. An all-reduce that a TPU runs as a reduce-scatter is one. Transfers over the
    network between slices of TPUs have the kind "between slices"; what they need inside a slice counts by itself.

    Args:
        text: What `as_text()` of a compiled program returns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jstep.tools.collectives import collectives_of
        >>> f = lambda x: x + 1  # moves nothing
        >>> collectives_of(jax.jit(f).lower(jnp.ones(8)).compile().as_text())
        {}
    """
    numbers: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for one in exchanges_of(parse_program(text)):
        numbers[one.kind] += one.times
        moved[one.kind] += one.times * one.bytes
    return {kind: Collective(numbers[kind], moved[kind]) for kind in KINDS if numbers[kind]}
