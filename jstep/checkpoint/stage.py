"""A reusable staging buffer for the arrays being saved."""

import functools
from collections.abc import Mapping
from typing import Any

import jax


class Stage:
    """Buffers into which arrays are copied, reused while shapes and shardings stay the same."""

    def __init__(self) -> None:
        self._held: dict[str, jax.Array] = {}

    def copy(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the arrays into the staging buffers. Arrays that an earlier call returned are deleted."""
        held, self._held = self._held, {}
        for name, array in arrays.items():
            if isinstance(array, jax.Array):
                old = held.pop(name, None)
                fits = old is not None and old.aval == array.aval and old.sharding == array.sharding
                self._held[name] = _copy_into(old, array) if fits else array.copy()
        return {**arrays, **self._held}


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copy_into(old: Any, new: jax.Array) -> jax.Array:
    del old  # donated: the result reuses its memory
    return new.copy()
