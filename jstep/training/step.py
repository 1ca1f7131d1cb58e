"""The compiled step: what compiles and donates."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_bool, as_function
from jstep.core.contexts import own_transfers
from jstep.core.meshes import alike, auto_axes, auto_mesh, in_explicit_mesh, lies_explicitly, on_auto_axes
from jstep.state import TrainState, require_alive
from jstep.training.constants import Constants, split_constants

Step = Callable[..., tuple[TrainState, dict[str, Any]]]
Parts = Callable[[Any, tuple[Any, ...], Any], tuple[Any, Any, Constants]]
"""`parts(state, args, rows) -> (state, computed, constants)`: a step, told where the rows of args lie (None: unknown),
that keeps apart what it computes and what is known without it."""


_OTHER_MESHES = "Mesh for all inputs should be equal"
_WAYS_OUT = {
    _OTHER_MESHES: "Lay the batch out by jstep.shard_batch, on the mesh that the state lies on.",
    "should match the aval mesh": (
        "A step computes on Auto axes. An array that a function of yours closes over, made while a mesh with Explicit "
        "axes was set, does not go with them: hand it over as an argument, or in NumPy."
    ),
    "in_specs passed to shard_map": (
        "A step computes on Auto axes, and the mesh that this shard_map names has Explicit ones. Make it with "
        "axis_types=(jax.sharding.AxisType.Auto, ...), or leave `mesh` out and call the step inside jax.set_mesh."
    ),
}
"""What JAX says of meshes → what to do about it in a step."""


class PureStep:
    """A training step as a pure function, `state, metrics = step(state, *args)`: neither compiled nor donating."""

    def __init__(self, parts: Parts, *, name: str = "train_step", looks_at_rows: bool = False) -> None:
        """A step of its parts; `looks_at_rows`: whether it asks where the rows of the batch lie."""
        self.parts = parts
        self.looks_at_rows = looks_at_rows
        self.__name__ = self.__qualname__ = name

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step."""
        with alike((state, args)) as (state, args):
            state, computed, constants = self.parts(state, args, None)
            return state, _joined(computed, constants)

    def __repr__(self) -> str:
        return f"<jstep.PureStep {self.__name__}>"


def pure(step: Callable[..., Any]) -> PureStep:
    """Any function `(state, *args) -> (state, metrics)` with its parts."""
    if isinstance(step, PureStep):
        return step
    if isinstance(step, TrainStep):
        return pure(step.__wrapped__)

    def parts(state: Any, args: tuple[Any, ...], rows: Any) -> tuple[Any, Any, Constants]:
        result = step(state, *args)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(f"the step returned a {type(result).__name__}; it must return (state, metrics)")
        return (result[0], *split_constants(result[1]))

    return PureStep(parts, name=getattr(step, "__name__", "train_step"))


def _joined(computed: Any, constants: Constants) -> Any:
    return {**computed, **constants.arrays()} if constants.values else computed


class TrainStep:
    """A compiled training step: `state, metrics = train_step(state, *args)`.

    The state passed in is donated (unless `donate=False`): its memory becomes the new state's, so keep the
    one returned. Every leaf of the state stays where it lies on a mesh. What `jax.jit` offers is there as well:
    `lower(state, *args)`, `trace(state, *args)`, `eval_shape(state, *args)`, `clear_cache()`.

    Args:
        step: The function to compile, `(state, *args) -> (state, metrics)`. A metric that is a plain number, of
            Python or NumPy, is a constant of the program, which is never computed.
        donate: Whether the compiled step takes over the memory of the state passed in.

    Attributes:
        __wrapped__: The pure function that is compiled.
        donate: Whether the state is donated.

    Raises:
        TypeError: `step` is no function, or `donate` no bool.
    """

    def __init__(self, step: Step, *, donate: bool = True) -> None:
        self.__wrapped__ = as_function(step, "step", "(state, *args) -> (state, metrics)")
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = type(self).__doc__ if isinstance(step, PureStep) else step.__doc__ or type(self).__doc__
        self.donate = as_bool(donate, "donate")
        self._pure = pure(step)
        self._programs: dict[Any, Any] = {}
        self._constants = Constants({})
        self._converts = False  # whether batches have come on Explicit axes
        # The state last returned, and the program that made it: one attribute, so that threads see both or neither.
        self._latest: tuple[Callable[[], Any], Any] = (lambda: None, None)

    def _jit(self, kind: str, rows: Any, shardings: Any, *, donate: bool) -> Any:
        parts = self._pure.parts

        def call(state: TrainState, *args: Any) -> Any:
            return parts(state, args, rows)

        def whole(state: TrainState, *args: Any) -> Any:
            state, computed, constants = parts(state, args, rows)
            return state, _joined(computed, constants)

        function = call if kind == "call" else whole
        function.__name__ = function.__qualname__ = self.__name__
        # Left to XLA, an output may lie otherwise than its input: donation would be lost, and the step compiled again
        # for its own result.
        others = (None, None) if kind == "call" else (None,)
        where: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, *others)}
        return jax.jit(function, donate_argnums=(0,) if donate else (), **where)

    def _for(self, state: Any, args: Any, kind: str = "call") -> Any:
        """The program for where state and rows lie: its call gives the parts, or `kind="whole"` state and metrics."""
        shardings, rows = _mesh_shardings(state), None
        if shardings is not None:
            require_alive(state)  # of a state on a mesh JAX would not say it, but crash
            if self._pure.looks_at_rows:
                rows = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), args)
        donate = self.donate and not _debugs()
        key = (kind, donate, *((trees.structure(tree), tuple(jax.tree.leaves(tree))) for tree in (shardings, rows)))
        if key not in self._programs:
            self._programs[key] = self._jit(kind, rows, shardings, donate=donate)
        return self._programs[key]

    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """One call of the compiled step."""
        if in_explicit_mesh():
            with auto_axes():
                return self._call(state, on_auto_axes(args))
        return self._call(state, args)

    def _call(self, state: TrainState, args: tuple[Any, ...]) -> tuple[TrainState, dict[str, Any]]:
        last, program = self._latest
        # A state that this step returned lies where it lay; only others have to be looked at.
        if last() is not state or program is None or self._pure.looks_at_rows or self._converts:
            state, args = on_auto_axes(state), on_auto_axes(args)
            program = self._for(state, args)
        try:
            state, metrics, constants = self._run(program, state, args)
        except (RuntimeError, ValueError) as error:
            if "delete" in str(error) or "donate" in str(error):
                if _of_a_nan(error):
                    raise FloatingPointError(
                        "the step made a NaN or an infinity, and where cannot be said any more: the state it was given "
                        "is donated. Set jax_debug_nans before the run's first step, which then donates nothing, or "
                        "ask jstep.find_nonfinite(train_step, state, ...)"
                    ) from error
                require_alive(state, error)
            for said, way_out in _WAYS_OUT.items():
                if said in str(error):
                    error.add_note(way_out)
            raise
        if constants.values:
            metrics.update(constants.arrays())
        self._constants = constants
        if isinstance(state, TrainState):
            self._latest = weakref.ref(state), program
        return state, metrics

    def _run(self, program: Any, state: Any, args: tuple[Any, ...]) -> Any:
        """The program's call, with arguments that JAX refuses taken as what they are; it does so before it runs."""
        try:
            return program(state, *args)
        except (RuntimeError, ValueError) as error:
            if _OTHER_MESHES in str(error) and any(map(lies_explicitly, trees.flatten(args)[0])):
                self._converts = True
                return program(state, *on_auto_axes(args))
            if not ("Disallowed" in str(error) and "transfer" in str(error)):
                raise
        # A transfer guard of the caller's is for what happens unasked, not for batches in NumPy arrays. The loss sees
        # it: what traces is out here.
        program.trace(state, *args)
        with own_transfers():
            return program(state, *args)

    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        with alike((state, args), always=True) as (state, args):
            return self._whole(state, args).lower(state, *args)

    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        with alike((state, args), always=True) as (state, args):
            return self._whole(state, args).trace(state, *args)

    def _whole(self, state: Any, args: Any) -> Any:
        return self._for(state, args, "whole")

    def eval_shape(self, state: TrainState, *args: Any) -> Any:
        """The shapes of the new state and of all metrics."""
        with alike((state, args), always=True) as (state, args):
            return jax.eval_shape(self._pure, state, *args)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        for program in self._programs.values():
            program.clear_cache()

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


def _of_a_nan(error: BaseException | None) -> bool:
    """Whether JAX raised it while it looked for the operation that made a NaN."""
    while error is not None and "FloatingPoint" not in type(error).__name__:
        error = error.__context__
    return error is not None


def _mesh_shardings(state: Any) -> Any:
    """A sharding for each leaf of a state that lies on a mesh; None where it lies on one device, or is traced."""
    leaves, treedef = trees.flatten(state)
    placed = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not trees.is_traced(leaf)]
    mesh = next((s.mesh for s in placed if isinstance(s, NamedSharding) and s.num_devices > 1), None)
    if mesh is None:
        return None
    everywhere = NamedSharding(auto_mesh(mesh), PartitionSpec())
    shardings = [getattr(leaf, "sharding", everywhere) for leaf in leaves]
    return treedef.unflatten([s if isinstance(s, NamedSharding) else everywhere for s in shardings])
