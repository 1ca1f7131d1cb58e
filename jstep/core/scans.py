"""Parameters of scan operations in different versions of JAX."""

from collections.abc import Mapping
from typing import Any


def counts_of(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many arguments of a scan are constants, and how many are carried; the others are sliced."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # JAX 0.12: three trees
    return len(consts), len(carried)
