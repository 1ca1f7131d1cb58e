"""The compiled step: what compiles and donates."""

import weakref
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.types import Array
from jstep.state import TrainState

Step = Callable[..., tuple[TrainState, dict[str, Any]]]


class TrainStep:
    """A compiled training step: `state, metrics = train_step(state, *args)`.

    The state passed in is donated (unless `donate=False`): its memory becomes the new state's, so keep the
    one returned. Every leaf of the state stays where it lies on a mesh. What `jax.jit` offers is there as well:
    `lower(state, *args)`, `trace(state, *args)`, `eval_shape(state, *args)`, `clear_cache()`. A program lowered by
    hand returns only the metrics that are computed; constant hyperparameters are put in by the call.

    Attributes:
        __wrapped__: The pure function that is compiled.
        donate: Whether the state is donated.
    """

    def __init__(
        self,
        step: Step,
        *,
        donate: bool,
        placed: Callable[[Any], Step] | None = None,
        known: Set[str] = frozenset(),
    ) -> None:
        self.__wrapped__ = step
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = step.__doc__ or type(self).__doc__
        self.donate = donate
        self.placed = placed or (lambda shardings: step)
        self._constants: dict[str, Array] = {}
        self._known = known
        self._on_one_device = self._jit(step)
        self._on_meshes: dict[Any, Any] = {}
        self._current: Any = self._on_one_device
        self._last: Callable[[], Any] = lambda: None

    def _jit(self, step: Step, **out_shardings: Any) -> Any:
        def compiled(state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
            new_state, metrics = step(state, *args)
            computed, constants = split_constants(metrics)
            with jax.ensure_compile_time_eval():
                self._constants = {name: jnp.asarray(value) for name, value in constants.items()}
            return new_state, computed

        compiled.__name__ = compiled.__qualname__ = self.__name__
        return jax.jit(compiled, donate_argnums=(0,) if self.donate else (), **out_shardings)

    def _for(self, state: Any, args: Any) -> Any:
        """The compiled function for where the state lies."""
        shardings = _mesh_shardings(state)
        if shardings is None:
            return self._on_one_device
        _explain_donation(state, None)  # of a state on a mesh JAX would not say it, but crash
        rows = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), args)
        key = tuple((trees.structure(tree), tuple(jax.tree.leaves(tree))) for tree in (shardings, rows))
        if key not in self._on_meshes:
            # Left to XLA, an output may lie otherwise than its input: donation would be lost, and the step compiled
            # again for its own result.
            self._on_meshes[key] = self._jit(self.placed(rows), out_shardings=(shardings, None))
        return self._on_meshes[key]

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """One call of the compiled step."""
        # A state that this step returned lies where it lay; only others have to be looked at.
        if self._last() is not state:
            self._current = self._for(state, args)
        try:
            state, metrics = self._current(state, *args)
        except (RuntimeError, ValueError) as error:
            if "delete" in str(error) or "donate" in str(error):
                _explain_donation(state, error)
            if "Mesh for all inputs should be equal" in str(error):
                error.add_note("Lay the batch out by jstep.shard_batch, on the mesh that the state lies on.")
            raise
        metrics.update(self._constants)
        self._last = weakref.ref(state)
        return state, metrics

    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        return self._for(state, args).lower(state, *args)

    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        return self._for(state, args).trace(state, *args)

    def eval_shape(self, state: TrainState, *args: Any) -> Any:
        """The shapes of the new state and of all metrics."""
        return jax.eval_shape(self.__wrapped__, state, *args)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        for jitted in (self._on_one_device, *self._on_meshes.values()):
            jitted.clear_cache()

    @property
    def constant_metrics(self) -> frozenset[str]:
        """The names of metrics that no step computes: hyperparameters that are plain numbers."""
        return frozenset(self._constants) | self._known

    def _cache_size(self) -> int:
        return sum(int(jitted._cache_size()) for jitted in (self._on_one_device, *self._on_meshes.values()))

    def __repr__(self) -> str:
        return f"<jstep.TrainStep {self.__name__}, donate={self.donate}>"


def _mesh_shardings(state: Any) -> Any:
    """A sharding for each leaf of a state that lies on a mesh; None where it lies on one device, or is traced."""
    leaves, treedef = trees.flatten(state)
    placed = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not trees.is_traced(leaf)]
    mesh = next((s.mesh for s in placed if isinstance(s, NamedSharding) and s.num_devices > 1), None)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = [getattr(leaf, "sharding", everywhere) for leaf in leaves]
    return treedef.unflatten([s if isinstance(s, NamedSharding) else everywhere for s in shardings])


def _explain_donation(state: Any, error: Exception | None) -> None:
    path = trees.donated_leaf(state)
    if path is not None:
        raise RuntimeError(
            f"the state's {path!r} was donated to an earlier step, whose result holds its memory now. Go on with "
            "the state a step returns, `state, metrics = train_step(state, ...)`, or keep old states alive with "
            "minimize(..., donate=False)."
        ) from error


def split_constants(metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step computes, and what is known without it: hyperparameters that are plain numbers."""
    constants = {name: value for name, value in metrics.items() if isinstance(value, np.ndarray | np.generic)}
    return {name: value for name, value in metrics.items() if name not in constants}, constants
