"""Parsing and validating topology names such as `v5e:4x4*2`, without loading a compiler."""

import math
import re
from typing import NamedTuple

from jstep.core import trees
from jstep.core.checks import as_text, shown
from jstep.topologies.devices import GPUS, LARGEST_CLUSTER, LARGEST_HOST, LARGEST_SLICES, TPUS

_FORM = re.compile(r"([A-Za-z0-9_\-]+):([0-9]{1,6}(?:x[0-9]{1,6})*)(?:\*([0-9]{1,6}))?")
_EXAMPLES = "'v5e:2x4', 'v5p:4x4x4', 'v5e:4x4*2' (two slices) or 'h100:4x8' (hosts x devices)"


class Name(NamedTuple):
    """A topology.

    Attributes:
        kind: The kind of its devices, such as `"v5e"`.
        sizes: For TPUs, the chips of a slice along each dimension; for GPUs, the hosts and the devices per host.
        slices: The number of TPU slices.
    """

    kind: str
    sizes: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        sizes = self.sizes[1:] if self.kind in GPUS and self.sizes[0] == 1 else self.sizes
        return f"{self.kind}:{'x'.join(map(str, sizes))}{f'*{self.slices}' if self.slices > 1 else ''}"

    def device_count(self) -> int:
        """Return the number of its devices, without a compiler."""
        per_chip = 1 if self.kind in GPUS else TPUS[self.kind].devices_per_chip
        return math.prod(self.sizes) * self.slices * per_chip


def parsed(name: str, argument: str = "name") -> Name:
    """Parse a topology name.

    Raises:
        TypeError: It is not a string.
        ValueError: The kind is unknown (the message lists the kinds) or does not come in this size.
    """
    as_text(name, argument, f"such as {_EXAMPLES}")
    kinds = f"the kinds are {', '.join((*TPUS, *GPUS))}"
    found = _FORM.fullmatch(name)
    if found is None:
        raise ValueError(f"{argument}={shown(name)}: expected KIND:SIZE, such as {_EXAMPLES}; {kinds}")
    kind, sizes = found[1], tuple(map(int, found[2].split("x")))
    slices = 1 if found[3] is None else int(found[3])
    if kind not in TPUS and kind not in GPUS:
        raise ValueError(f"{argument}={name!r}: unknown kind {kind!r}{trees.nearest(kind, (*TPUS, *GPUS))}; {kinds}")
    problem = _of_gpus(sizes, found[3]) if kind in GPUS else _of_tpus(kind, sizes, slices)
    if problem:
        raise ValueError(f"{argument}={name!r}: {problem}")
    return Name(kind, (1, *sizes) if kind in GPUS and len(sizes) == 1 else sizes, slices)


def _of_tpus(kind: str, sizes: tuple[int, ...], slices: int) -> str:
    largest = TPUS[kind].largest
    dims = len(largest)
    example = f"{kind}:{'x'.join(['2', '2', '1'][:dims])}"
    most = f"{kind}:{'x'.join(map(str, sorted(largest)))}"
    if len(sizes) != dims:
        return f"a slice of {kind} has {dims} dimensions, got {len(sizes)}; write one such as {example!r}"
    if any(size > bound for size, bound in zip(sorted(sizes, reverse=True), largest, strict=True)):
        return f"a slice of {kind} has at most {'x'.join(map(str, largest))} chips; for more write slices, '{most}*2'"
    # A host has 2x2 chips, except in a slice of a single chip.
    if set(sizes) != {1} and (sizes[0] % 2 or sizes[1] % 2 or 0 in sizes):
        one = f"{kind}:{'x'.join(['1'] * dims)}"
        return f"hosts have 2x2 chips, so the first two sizes must be even and none 0 (or all 1: {one!r})"
    if not 1 <= slices <= LARGEST_SLICES:
        return f"expected 1 to {LARGEST_SLICES} slices, got {slices}"
    return ""


def _of_gpus(sizes: tuple[int, ...], slices: str | None) -> str:
    if slices is not None:
        return "only TPUs have slices; write GPUs as HOSTSxDEVICES, such as 'h100:4x8'"
    if len(sizes) > 2 or 0 in sizes:
        return "expected the devices of one host, such as 'h100:8', or HOSTSxDEVICES, such as 'h100:4x8'"
    if sizes[-1] > LARGEST_HOST:
        return f"a host has at most {LARGEST_HOST} devices; write HOSTSxDEVICES, such as 'h100:{sizes[-1] // 8}x8'"
    if sizes[0] * sizes[-1] > LARGEST_CLUSTER:
        return f"expected at most {LARGEST_CLUSTER} devices"
    return ""
