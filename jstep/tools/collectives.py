"""Collectives of a compiled program, by kind."""

from collections import Counter
from typing import NamedTuple

from jstep.tools.compiled.exchanges import KINDS, exchanges_of
from jstep.tools.compiled.program import parse_program


class Collective(NamedTuple):
    """The collectives of one kind in a step.

    Attributes:
        number: How many run per step; those in loops count as often as they run.
        bytes: Bytes that a device sends or receives, the larger of the two, summed over all of them.
    """

    number: int
    bytes: int


def collectives_of(text: str) -> dict[str, Collective]:
    """Return kind → number and bytes, parsed from the HLO of a compiled program.

    Collectives in loops count as often as the loop runs, or once if that depends on values. Of a conditional, the
    branch that moves the most bytes counts. An asynchronous collective counts once. An all-reduce that a TPU runs as a
    reduce-scatter counts as a reduce-scatter. Transfers over the network between TPU slices have the kind "between
    slices"; the collectives that they need inside a slice count separately.

    Args:
        text: The result of `compiled.as_text()`.

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
