"""What a compiled program moves between devices, on CPUs, GPUs and TPUs: `collectives`."""

import collections
import math
import re
from typing import NamedTuple

KINDS = (
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|"
    r"collective-permute|collective-broadcast)"
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_BODY = re.compile(r"body=%([\w.\-]+)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))"
)
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%([\w.\-]+)")


class Collective(NamedTuple):
    """The collectives of one kind in a step: how many run, and the bytes that a device sends or
    receives in all."""

    number: int
    bytes: int


def collectives(text):
    """Return kind → number and bytes of a compiled program; a loop of unknown length counts
    once."""
    computations, entry = _computations(text)
    seen = set()

    def within(name, times):
        found = []
        for _, kind, sizes, rest in computations.get(name, {}).values():
            chain = re.search(r'chain_id="(\w+)"', rest)
            if re.fullmatch(f"{KINDS}(-start)?", kind):
                # On a TPU several copies of an instruction may belong to one asynchronous exchange.
                is_copy = chain is not None and "AsyncCollectiveStart" in text and chain[1] in seen
                seen.update([chain[1]] if chain else [])
                found += [] if is_copy else [(kind.removesuffix("-start"), times, sizes)]
            elif kind == "while":
                condition, body = _CONDITION.search(rest)[1], _BODY.search(rest)[1]
                count = _trip_count(rest, computations[condition])
                found += [
                    *within(body, times * count),
                    *within(condition, times * (count + (count > 1))),
                ]
            elif kind == "conditional":
                branches = [
                    within(name, times)
                    for some in _BRANCHES.findall(rest)
                    for name in _names(" ".join(some))
                ]
                found += max(
                    branches, key=lambda branch: sum(n * size for _, n, size in branch), default=[]
                )
            elif not kind.endswith(("-update", "-done")):
                found += [each for name in _CALLED.findall(rest) for each in within(name, times)]
        return found

    number, moved = collections.Counter(), collections.Counter()
    for kind, times, size in within(entry, 1):
        number[kind] += times
        moved[kind] += times * size
    return {kind: Collective(number[kind], moved[kind]) for kind in number}


def _computations(text):
    """Computation → name of an instruction → its bytes, its operation, the bytes that it moves, and
    the rest."""
    computations, entry, here = {}, "", {}
    for line in text.splitlines():
        if not line.startswith((" ", "HloModule")) and (head := _HEAD.match(line)):
            here = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.match(line):
            name, shape, kind, rest = match.groups()
            given = sum(
                here[operand][0] for operand in _names(rest.partition(")")[0]) if operand in here
            )
            size = _bytes(shape)
            # The result of the start of an exchange has its operands, too.
            taken = size - given if kind.endswith("-start") else size
            here[name] = size, kind, max(taken, given), rest
    return computations, entry


def _names(text):
    return re.findall(r"%([\w.\-]+)", text)


def _bytes(shape):
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", dtype)
        total += (
            math.prod(int(n) for n in dims.split(",") if n)
            * (max(8, int(bits[0])) if bits else 8)
            // 8
        )
    return total


def _trip_count(loop, condition):
    """How often a loop runs, as printed for CPUs and GPUs; on a TPU the bound of its counter, which
    begins at 0."""
    printed = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop)
    bounds = [
        re.match(r"(\d+)\)", rest) for _, kind, _, rest in condition.values() if kind == "constant"
    ]
    bound = int(printed[1]) if printed else next((int(bound[1]) for bound in bounds if bound), 1)
    # The loops that XLA makes for products with gathered operands advance by 2.
    return -(-bound // 2) if not printed and "windowed_dot_general" in loop else bound
