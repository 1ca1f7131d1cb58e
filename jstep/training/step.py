"""The compiled step: what compiles and donates."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_bool, as_function
from jstep.core.compile_only import refuse_shapes
from jstep.core.contexts import internal_transfers
from jstep.core.memory import sharded
from jstep.core.meshes import Attempts, is_traced, mesh_of, sharded_like, using_mesh
from jstep.optimizers.metrics import SKIPPED
from jstep.state import TrainState, require_alive
from jstep.training.call_errors import explain, is_spent, refuse_shared_buffers
from jstep.training.constants import Constants, split_constants

Step = Callable[..., tuple[TrainState, dict[str, Any]]]
Parts = Callable[[Any, tuple[Any, ...], Any], tuple[Any, Any, Constants]]
"""`parts(state, args, batch_specs) -> (state, computed, constants)`: a step with the shardings of args (None: unknown)
that keeps apart what it computes and what is known without it."""


class PureStep:
    """A training step as a pure function, `state, metrics = step(state, *args)`: neither compiled nor donating."""

    def __init__(
        self,
        parts: Parts,
        *,
        name: str = "train_step",
        title: str | None = None,
        looks_at_rows: bool = False,
        leading_axes: int = 0,
    ) -> None:
        """A step of its parts.

        Args:
            parts: The parts.
            name: What it is called.
            title: What tells it from the other steps of a run; its name if None.
            looks_at_rows: Whether it needs to know how the rows of the batch are sharded.
            leading_axes: The number of axes of the batch before that of its rows.
        """
        self.parts = parts
        self.looks_at_rows = looks_at_rows
        self.leading_axes = leading_axes
        self.__name__ = self.__qualname__ = name
        self.title = title or name

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step."""
        refuse_shapes((state, args), "state and batch")
        with using_mesh(mesh_of((state, args))):
            return whole(self.parts, state, args, self.batch_specs(args))

    def batch_specs(self, args: tuple[Any, ...]) -> Any:
        """The shardings of a batch, where they count and are known; None of a batch that is on no mesh, or traced."""
        if not self.looks_at_rows or mesh_of(args) is None:
            return None
        return jax.tree.map(lambda leaf: None if is_traced(leaf) else getattr(leaf, "sharding", None), args)

    def __repr__(self) -> str:
        return f"<jstep.PureStep {self.__name__}>"


def leading_axes(step: Any) -> int:
    """The number of axes of a step's batch before that of its rows: one more for each `scan_steps`."""
    return pure(step).leading_axes if isinstance(step, PureStep | TrainStep) else 0


def pure(step: Callable[..., Any]) -> PureStep:
    """Any function `(state, *args) -> (state, metrics)` with its parts."""
    if isinstance(step, PureStep):
        return step
    if isinstance(step, TrainStep):
        return pure(step.__wrapped__)

    name = getattr(step, "__name__", "train_step")
    attempts = Attempts(name)

    def parts(state: Any, args: tuple[Any, ...], batch_specs: Any) -> tuple[Any, Any, Constants]:
        def one(state: Any, args: tuple[Any, ...]) -> Any:
            result = step(state, *args)
            if not isinstance(result, tuple | list) or len(result) != 2:
                raise TypeError(f"the step returned a {type(result).__name__}; it must return (state, metrics)")
            return tuple(result)

        new, metrics = attempts(one, state, args, place=sharded_like((state,)))
        # A function that is not of jstep's says by the name that jstep's metric has that its update was skipped.
        is_guarded = isinstance(metrics, dict) and SKIPPED in metrics
        return (new, *split_constants(metrics, SKIPPED if is_guarded else None))

    return PureStep(parts, name=name)


def whole(parts: Parts, state: Any, args: tuple[Any, ...], batch_specs: Any) -> tuple[Any, Any]:
    """A step of its parts: the new state and all metrics."""
    state, computed, constants = parts(state, args, batch_specs)
    return state, {**computed, **constants.arrays()} if constants.values else computed


class TrainStep:
    """A compiled training step: `state, metrics = train_step(state, *args)`.

    The state passed in is donated (unless `donate=False`): its memory becomes the new state's, so keep the
    one returned. Every leaf of the state keeps its sharding, and the step is traced with the mesh of the state set.
    What `jax.jit` offers is there as well:
    `lower(state, *args)`, `trace(state, *args)`, `eval_shape(state, *args)`, `clear_cache()`.

    Args:
        step: The function to compile, `(state, *args) -> (state, metrics)`. A metric that is a plain number, of
            Python or NumPy, is a constant of the program, which is never computed.
        donate: Whether the compiled step takes over the memory of the state passed in.

    Attributes:
        __wrapped__: The pure function that is compiled.
        donate: Whether the state is donated.
        title: What tells it from the other steps of a run: the name of its loss, if `minimize` made it.

    Raises:
        TypeError: `step` is no function, or `donate` no bool.
    """

    def __init__(self, step: Step, *, donate: bool = True) -> None:
        self.__wrapped__ = as_function(step, "step", "(state, *args) -> (state, metrics)")
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = type(self).__doc__ if isinstance(step, PureStep) else step.__doc__ or type(self).__doc__
        self.donate = as_bool(donate, "donate")
        self._pure = pure(step)
        self.title = self._pure.title
        self._programs: dict[Any, Any] = {}
        self._constants = Constants({})
        # The state last returned, the program that made it, its mesh: one attribute, so that threads see all or none.
        self._latest: tuple[Callable[[], Any], Any, Any] = (lambda: None, None, None)

    def _jit(self, kind: str, batch_specs: Any, shardings: Any, *, donate: bool) -> Any:
        parts = self._pure.parts

        def function(state: TrainState, *args: Any) -> Any:
            with sharded(shardings):
                return parts(state, args, batch_specs) if kind == "call" else whole(parts, state, args, batch_specs)

        function.__name__ = function.__qualname__ = self.__name__
        # Left to XLA, an output may lie otherwise than its input: donation would be lost, and the step compiled again
        # for its own result.
        others = (None, None) if kind == "call" else (None,)
        where: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, *others)}
        return jax.jit(function, donate_argnums=(0,) if donate else (), **where)

    def _for(self, state: Any, args: Any, kind: str = "call") -> Any:
        """The program for where state and rows lie: its call gives the parts, or `kind="whole"` state and metrics."""
        shardings, batch_specs = _mesh_shardings(state), self._pure.batch_specs(args)
        if shardings is not None:
            require_alive(state)  # of a state on a mesh JAX would not say it, but crash
        donate = self.donate and not _debugs()
        key = (
            kind,
            donate,
            *((trees.structure(tree), tuple(jax.tree.leaves(tree))) for tree in (shardings, batch_specs)),
        )
        if key not in self._programs:
            self._programs[key] = self._jit(kind, batch_specs, shardings, donate=donate)
        return self._programs[key]

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """One call of the compiled step."""
        last, program, mesh = self._latest
        # A state that this step returned is sharded as before; only others have to be looked at.
        is_latest = last() is state and program is not None
        if not is_latest:
            refuse_shapes((state, args), "state and batch")
        if not is_latest or self._pure.looks_at_rows:
            program, mesh = self._for(state, args), mesh_of((state, args))
        if mesh is not None and self.donate and not _debugs():
            refuse_shared_buffers(state, args, by_identity=is_latest)
        if mesh is None:
            new, metrics, constants = self._run(program, state, args, is_latest)
        else:
            with using_mesh(mesh):
                new, metrics, constants = self._run(program, state, args, is_latest)
        if constants.values:
            metrics.update(constants.arrays())
        self._constants = constants
        if isinstance(new, TrainState):
            mesh = mesh_of(new.global_step) if mesh is None and not is_latest else mesh
            self._latest = weakref.ref(new), program, mesh
        return new, metrics

    def _run(self, program: Any, state: Any, args: tuple[Any, ...], is_latest: bool) -> Any:
        was_spent = not is_latest and is_spent(state)
        transfers = internal_transfers()
        try:
            if isinstance(transfers, contextlib.nullcontext):
                return program(state, *args)
            # A transfer guard of the caller's is not for batches in NumPy arrays. The loss, traced out here, sees it.
            program.trace(state, *args)
            with transfers:
                return program(state, *args)
        except (RuntimeError, ValueError) as error:
            explain(error, state, args, was_spent=was_spent, donates=self.donate)
            raise

    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        with using_mesh(mesh_of((state, args))):
            return self._whole(state, args).lower(state, *args)

    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        with using_mesh(mesh_of((state, args))):
            return self._whole(state, args).trace(state, *args)

    def traced_call(self, state: TrainState, *args: Any) -> Any:
        """Return the trace of what a call runs; compiled for shapes, it is not compiled again by the call."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args).trace(state, *args)

    def _whole(self, state: Any, args: Any) -> Any:
        return self._for(state, args, "whole")

    def eval_shape(self, state: TrainState, *args: Any) -> Any:
        """The shapes of the new state and of all metrics; the state is sharded as the one given."""
        with using_mesh(mesh_of((state, args))):
            batch_specs = self._pure.batch_specs(args)
            new, metrics = jax.eval_shape(
                lambda state, *args: whole(self._pure.parts, state, args, batch_specs), state, *args
            )
        shardings = _mesh_shardings(state)
        if shardings is not None and trees.structure(new) == trees.structure(shardings):
            new = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), new, shardings)
        return new, metrics

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        for program in self._programs.values():
            program.clear_cache()

    @property
    def skip_metric(self) -> str | None:
        """The name of the metric that says whether the whole update was skipped; None if nothing guards the update."""
        return self._constants.skipped

    @property
    def constant_metrics(self) -> frozenset[str]:
        """The names of the metrics of the latest call that no step computes: hyperparameters that are plain numbers."""
        return frozenset(self._constants.values)

    def _cache_size(self) -> int:
        return sum(int(program._cache_size()) for program in self._programs.values())

    def __repr__(self) -> str:
        return f"<jstep.TrainStep {self.__name__}, donate={self.donate}>"


def _debugs() -> bool:
    """Whether JAX computes a step that made a NaN once more, operation by operation: of what was not donated."""
    flags: Any = jax.config  # made at run time, so that no checker knows them
    return bool(flags.jax_debug_nans or flags.jax_debug_infs)


def _mesh_shardings(state: Any) -> Any:
    """A sharding for each leaf of a state that is on a mesh; None of a state on one device, or a traced one."""
    mesh = mesh_of(state)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = trees.flatten(state)
    shardings = [getattr(leaf, "sharding", everywhere) for leaf in leaves]
    return treedef.unflatten([one if isinstance(one, NamedSharding) else everywhere for one in shardings])
