"""Detection of rematerialization by the compiler."""

import re

from jstep.tools.compiled.program import parse_program

_COPY = re.compile(r"\.remat(?:\d|_compressed|_uncompressed|\.|$)")
"""Names of rematerialized instructions: "fusion.3.remat", "fusion.3.remat2.1".

Operations of `jax.checkpoint` have such words in their metadata, not after a dot in their names.
"""


def recomputes(text: str) -> bool:
    """Whether the compiler rematerialized results to fit the program into memory.

    Such a program takes longer than the operations of the model suggest. Rematerialization requested by the model, with
    `jax.checkpoint`, does not count.

    Args:
        text: The result of `compiled.as_text()`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jstep.tools.recomputed import recomputes
        >>> f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())
        >>> recomputes(jax.jit(jax.grad(f)).lower(jnp.ones(8)).compile().as_text())
        False
    """
    if ".remat" not in text:
        return False
    computations = parse_program(text).computations.values()
    return any(_COPY.search(name) for computation in computations for name in computation.instructions)
