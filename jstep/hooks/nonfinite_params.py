"""Find parameters that contain NaN or infinity."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.core.memory import on_devices
from jstep.core.places import compute_on, places_of
from jstep.hooks.values import host

FINITE, INFINITE, NAN = range(3)
"""The contents of an array: only finite numbers; infinity but no NaN; NaN."""


class NonfiniteParams:
    """The contents of each parameter of a state, computed where it is; creating the object does not wait.

    Args:
        state: The state; one without `params` has no parameters.
    """

    def __init__(self, state: Any) -> None:
        named = [one for one in trees.leaves_with_paths(getattr(state, "params", None)) if _is_inexact(one[1])]
        self._paths = [f"params/{path}" if path else "params" for path, _ in named]
        leaves = [leaf for _, leaf in named]
        places = places_of(leaves)
        with internal_transfers():
            self._parts = [
                (numbers, compute_on(mesh, _contents, [leaves[i] for i in numbers]))
                for numbers, mesh in places.on_devices
            ]
            if places.on_host:
                self._parts.append((places.on_host, _contents([leaves[i] for i in places.on_host])))

    def contents(self) -> dict[str, int]:
        """Wait for the contents of each parameter and return them by path."""
        found: dict[str, int] = {}
        with internal_transfers():
            for numbers, part in self._parts:
                found.update(zip([self._paths[i] for i in numbers], host(part).tolist(), strict=True))
        return found

    def with_nan(self) -> list[str]:
        """Wait, and return the paths of the parameters that contain NaN."""
        return [path for path, contents in self.contents().items() if contents == NAN]

    def worse_than(self, before: "NonfiniteParams") -> dict[str, int]:
        """Wait, and return the parameters that contain NaN or infinity and did not before, with their contents."""
        then = before.contents()
        return {path: now for path, now in self.contents().items() if now > then.get(path, FINITE)}


def listed(paths: list[str]) -> str:
    """Format paths as the first one and the number of others."""
    others = len(paths) - 1
    return paths[0] + (f" and {others} other parameter{'s' if others > 1 else ''}" if others else "")


def _is_inexact(leaf: Any) -> bool:
    return trees.is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact) and leaf.size > 0


def _contents(leaves: list[Any]) -> Any:
    return jnp.stack([_content(on_devices(leaf)) for leaf in leaves])


def _content(leaf: Any) -> Any:
    worst = jnp.where(jnp.isnan(leaf), np.int8(NAN), jnp.where(jnp.isinf(leaf), np.int8(INFINITE), np.int8(FINITE)))
    return worst.max()
