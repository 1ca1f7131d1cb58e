"""Whether a compiler computes results twice to fit a program into memory, read from the program's text."""

import re

from jstep.tools.compiled.program import parse_program

_COPY = re.compile(r"\.remat(?:\d|_compressed|_uncompressed|\.|$)")
"""How XLA names the copy of an instruction that it runs again: "fusion.3.remat", "fusion.3.remat2.1".

Operations of `jax.checkpoint` have such words in their metadata, not after a dot in their names.
"""


def recomputes(text: str) -> bool:
    """Whether the compiler rematerialized something because the program would not have fit otherwise.

    It takes longer then than the operations of the model suggest. `jax.checkpoint`, with which a model asks for less
    memory itself, does not count.

    Args:
        text: What `as_text()` of a compiled program returns.

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
