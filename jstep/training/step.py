"""The compiled training step, which donates its state."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_bool, as_function, kind
from jstep.core.meshes import Attempts, internal_transfers, mesh_of, sharded_like, using_mesh
from jstep.core.placement import refuse_shapes, sharded
from jstep.core.trees import is_traced
from jstep.optimizers.hyperparameters import SKIPPED
from jstep.state.train_state import TrainState, keep_roles, require_alive
from jstep.training.call_errors import explain, is_spent, refuse_shared_buffers
from jstep.training.constants import Constants, split_constants

Step = Callable[..., tuple[TrainState, dict[str, Any]]]
Parts = Callable[[Any, tuple[Any, ...], Any], tuple[Any, Any, Constants]]
"""`parts(state, args, batch_specs) -> (state, computed, constants)`: a step that separates the metrics it computes from
those that are constant. `batch_specs` are the shardings of args; None if unknown."""


@dataclasses.dataclass(eq=False, repr=False)
class PureStep:
    """A training step as a pure function, `state, metrics = step(state, *args)`: neither compiled nor donating.

    Attributes:
        parts: The step with computed and constant metrics separated.
        name: The name of the function.
        title: A name that identifies the step among those of a run; `name` if empty.
        looks_at_rows: Whether the step depends on how the rows of the batch are sharded.
        leading_axes: The number of batch axes before that of the rows: one for each `scan_steps`.
        lanes: The number of lanes, if the step computes in lanes.
    """

    parts: Parts
    _: dataclasses.KW_ONLY
    name: str = "train_step"
    title: str = ""
    looks_at_rows: bool = False
    leading_axes: int = 0
    lanes: int | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name
        self.title = self.title or self.name

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """Run one step."""
        refuse_shapes((state, args), "state and batch")
        with using_mesh(mesh_of((state, args))):
            return whole(self.parts, state, args, self.batch_specs(args))

    def batch_specs(self, args: tuple[Any, ...]) -> Any:
        """Return the shardings of a batch; None if the step ignores them or the batch is on no mesh."""
        if not self.looks_at_rows or mesh_of(args) is None:
            return None
        return jax.tree.map(lambda leaf: None if is_traced(leaf) else getattr(leaf, "sharding", None), args)

    def __repr__(self) -> str:
        return f"<jstep.PureStep {self.__name__}>"


def pure(step: Callable[..., Any]) -> PureStep:
    """Return any function `(state, *args) -> (state, metrics)` as a `PureStep`."""
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
                raise TypeError(f"the step returned {kind(result)}; it must return (state, metrics)")
            if isinstance(state, TrainState) and not isinstance(result[0], TrainState):
                kinds = " and ".join(map(kind, result))
                raise TypeError(f"the step returned {kinds}; it must return (state, metrics)")
            return keep_roles(state, result[0]), result[1]

        new, metrics = attempts(one, state, args, place=sharded_like((state,)))
        # A user-defined step reports a skipped update with a metric of the same name as jstep's.
        is_guarded = isinstance(metrics, dict) and SKIPPED in metrics
        return (new, *split_constants(metrics, SKIPPED if is_guarded else None))

    return PureStep(parts, name=name)


def whole(parts: Parts, state: Any, args: tuple[Any, ...], batch_specs: Any) -> tuple[Any, Any]:
    """Run a step given by its parts and return the new state and all metrics."""
    state, computed, constants = parts(state, args, batch_specs)
    return state, {**computed, **constants.arrays} if constants.values else computed


def traced(parts: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """Run the body of a program; called only while JAX traces it."""
    with sharded(shardings):
        return parts(*args)


class TrainStep:
    """A compiled training step: `state, metrics = train_step(state, *args)`.

    The state passed in is donated (unless `donate=False`): its memory is reused for the new state, so use only the
    returned one. Every leaf of the state keeps its sharding, and the step is traced under the mesh of the state.
    The methods of `jax.jit` functions are available:
    `lower(state, *args)`, `trace(state, *args)`, `eval_shape(state, *args)`, `clear_cache()`.

    Args:
        step: The function to compile, `(state, *args) -> (state, metrics)`. A metric that is a plain Python or NumPy
            number is a constant of the program and is not computed on the device.
        donate: Whether the compiled step donates the state passed in.

    Attributes:
        __wrapped__: The pure function that is compiled.
        donate: Whether the state is donated.
        title: A name that identifies the step among those of a run: for a step of `minimize`, the name of its loss.
        lanes: The number of lanes, as in `minimize`; None without lanes.

    Raises:
        TypeError: `step` is not a function, or `donate` is not a bool.
    """

    def __init__(self, step: Step, *, donate: bool = True) -> None:
        self.__wrapped__ = as_function(step, "step", "(state, *args) -> (state, metrics)")
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = type(self).__doc__ if isinstance(step, PureStep) else step.__doc__ or type(self).__doc__
        self.donate = as_bool(donate, "donate")
        self._pure = pure(step)
        self.title = self._pure.title
        self.lanes = self._pure.lanes
        self._programs: dict[Any, Any] = {}
        self._constants = Constants({})
        # The last returned state, its program and its mesh, in one attribute so that threads see a consistent triple.
        self._latest: tuple[Callable[[], Any], Any, Any] = (lambda: None, None, None)
        self._keeps_roles = True

    def _jit(self, kind: str, batch_specs: Any, shardings: Any, *, donate: bool) -> Any:
        parts = self._pure.parts if kind == "call" else functools.partial(whole, self._pure.parts)

        def function(state: TrainState, *args: Any) -> Any:
            return traced(parts, shardings, state, args, batch_specs)

        function.__name__ = function.__qualname__ = self.__name__
        # Otherwise XLA may choose another sharding for an output than for its input, which prevents donation and
        # recompiles the step for its own result.
        others = self._other_shardings(shardings) if kind == "call" else (None,)
        where: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, *others)}
        return jax.jit(function, donate_argnums=(0,) if donate else (), **where)

    def _other_shardings(self, shardings: Any) -> tuple[Any, Any]:
        """The shardings of the computed and the constant metrics, for those of a state on a mesh."""
        return None, None

    def _for(self, state: Any, args: Any, kind: str = "call") -> Any:
        """Return the program for the shardings of state and batch; `kind="whole"` returns all metrics together."""
        shardings, batch_specs = _mesh_shardings(state), self._pure.batch_specs(args)
        if shardings is not None:
            require_alive(state)  # for a donated state on a mesh JAX would crash instead of raising an error
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
        """Call the compiled step."""
        new, metrics, constants = self.run(state, *args)
        if constants.values:
            metrics.update(constants.arrays)
        return new, metrics

    def run(self, state: TrainState, *args: Any) -> tuple[TrainState, Any, Constants]:
        """Call the compiled step; return the metrics that it computed and the constant ones apart."""
        last, program, mesh = self._latest
        # The state that this step last returned has the same sharding as before; only others are inspected.
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
        self._constants = constants
        kept = keep_roles(state, new)  # the step may have been compiled for a state made by hand
        if isinstance(kept, TrainState):
            mesh = mesh_of(kept.global_step) if mesh is None and not is_latest else mesh
            self._latest = weakref.ref(kept), program, mesh
            self._keeps_roles = kept is new
        return kept, metrics, constants

    def program_after(self, state: Any) -> Callable[..., Any] | None:
        """Return the program for the state that the last call returned, if running it is all that calls have to do.

        It is `program(state, *args) -> (new, metrics, constants)`, for its own results, too. None if there is more to
        do: for a state on a mesh, or if an error could not be distinguished from one that left the state alone.
        """
        last, program, mesh = self._latest
        is_all = self.donate and self._keeps_roles and mesh is None and not self._pure.looks_at_rows
        return program if is_all and last() is state else None

    def explain(self, error: Exception, state: Any, args: tuple[Any, ...]) -> None:
        """Raise a clearer error for one of the program, if the arguments reveal the cause, or add a note to it."""
        explain(error, state, args, was_spent=False, donates=self.donate)

    def _run(self, program: Any, state: Any, args: tuple[Any, ...], is_latest: bool) -> Any:
        was_spent = not is_latest and is_spent(state)
        transfers = internal_transfers()
        try:
            if isinstance(transfers, contextlib.nullcontext):
                return program(state, *args)
            # The caller's transfer guard applies to the loss, which is traced here, but not to batches of NumPy arrays.
            program.trace(state, *args)
            with transfers:
                return program(state, *args)
        except Exception as error:
            explain(error, state, args, was_spent=was_spent, donates=self.donate)
            raise

    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args, "whole").lower(state, *args)

    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args, "whole").trace(state, *args)

    def traced_call(self, state: TrainState, *args: Any) -> Any:
        """Return the trace of the program that a call runs; once it is compiled, the call does not recompile."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args).trace(state, *args)

    def eval_shape(self, state: TrainState, *args: Any) -> Any:
        """Return the shapes of the new state and of all metrics; the new state has the sharding of the given one."""
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
        """Clear the compilation cache."""
        for program in self._programs.values():
            program.clear_cache()

    @property
    def skip_metric(self) -> str | None:
        """The name of the metric that reports whether the whole update was skipped; None without a guard."""
        return self._constants.skipped

    @property
    def constant_metrics(self) -> frozenset[str]:
        """The names of the constant metrics of the latest call, such as hyperparameters that are plain numbers."""
        return frozenset(self._constants.values)

    def _cache_size(self) -> int:
        return sum(int(program._cache_size()) for program in self._programs.values())

    def __repr__(self) -> str:
        return f"<jstep.TrainStep {self.__name__}, donate={self.donate}>"


def _debugs() -> bool:
    """Whether JAX reruns a step that produced a NaN operation by operation, which requires its inputs undonated."""
    flags: Any = jax.config  # the attributes are created at run time and unknown to type checkers
    return bool(flags.jax_debug_nans or flags.jax_debug_infs)


def _mesh_shardings(state: Any) -> Any:
    """Return a sharding for each leaf of a state on a mesh; None for a state on one device or a traced one."""
    mesh = mesh_of(state)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = trees.flatten(state)
    shardings = [getattr(leaf, "sharding", everywhere) for leaf in leaves]
    return treedef.unflatten([one if isinstance(one, NamedSharding) else everywhere for one in shardings])
