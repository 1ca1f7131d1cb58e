"""What a scan's arguments are, in the words of each JAX."""

from collections.abc import Mapping
from typing import Any


def counts_of(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's arguments are constants, and how many are carried; the others are sliced."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # JAX 0.12: three trees
    return len(consts), len(carried)
