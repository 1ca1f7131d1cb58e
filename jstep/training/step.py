"""The compiled training step, the constants among its metrics, and errors that say which argument caused them."""

import contextlib
import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_bool, as_function, explain_jax, kind, note
from jstep.core.meshes import Attempts, internal_transfers, mesh_of, sharded_like, using_mesh
from jstep.core.placement import refuse_shapes, sharded
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Optimizer, Params
from jstep.distributed.processes import AgreedShapes, is_single_process
from jstep.optimizers.hyperparameters import SKIPPED
from jstep.state.train_state import FlatState, TrainState, keep_roles, require_alive, state_of

# Constant metrics: hyperparameters that are plain numbers and need not be computed.
#
# An output of a compiled program costs some 2 µs per call on a CPU, so constants are not outputs. They are a static
# result of the trace, in the tree structure of its return value, which JAX keeps with the compiled program.


@jax.tree_util.register_static
class Constants:
    """Numbers known without running the program; a pytree without leaves that compares by their values.

    Attributes:
        values: Name → read-only NumPy array.
        skipped: The name of the metric that reports whether the update was skipped; None without a guard.
        arrays: Name → NumPy scalar or read-only array; not to be changed.
    """

    def __init__(self, values: dict[str, np.ndarray[Any, Any]], skipped: str | None = None) -> None:
        self.values = values
        self.skipped = skipped
        known = ((name, str(value.dtype), value.shape, value.tobytes()) for name, value in values.items())
        self._key = (skipped, *known)
        # The same objects at each call, because they are compared by identity at every step.
        self.arrays = {name: value[()] for name, value in values.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def repeated(self, k: int) -> "Constants":
        """Return the numbers of K steps, stacked."""
        stacked = {name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.values.items()}
        return Constants(stacked, self.skipped)


def split_constants(metrics: Any, skipped: str | None = None) -> tuple[Any, Constants]:
    """Split metrics into those that a step computes and those that are plain Python or NumPy numbers.

    Args:
        metrics: The metrics of a step. Anything but a dict counts as computed.
        skipped: The name of the metric that reports whether the update was skipped.
    """
    if type(metrics) is not dict:
        return metrics, Constants({}, skipped)
    plain = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)}
    constants = {name: value for name, value in plain.items() if value is not None}
    return {name: value for name, value in metrics.items() if name not in constants}, Constants(constants, skipped)


def _plain(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a plain number to the dtype that JAX would give it; return None for anything else."""
    if isinstance(value, bool | np.bool_):
        return np.asarray(value)
    if isinstance(value, int):
        fits = -(2**31) <= value < 2**31 or trees.default_int() == np.int64
        return np.asarray(value, trees.default_int()) if fits else None
    if isinstance(value, float):
        return np.asarray(value, trees.default_float())
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and value.dtype.kind in "iufcV":
        return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
    return None


# Explanations of JAX errors in calls of a training step, derived from its arguments.

_ON_ONE_MESH = (
    "The state and the batch, or arrays that the loss closes over, are on different devices or on different meshes. Put"
    " all of them on one mesh object: jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)

_CAPTURED = (
    "The state and the batch are on the same devices, so the loss probably closes over an array that is on others, "
    "such as one sharded over a mesh, or uses another mesh. Pass the array to the step as an argument, or keep it in "
    "the state (TrainState.create(..., model_state=...), has_model_state=True), and place both on one mesh: "
    "jstep.shard_state(state, mesh), jstep.shard_batch(batch, mesh)."
)
_OF_DEVICES = re.compile(r"incompatible devices|device assignment|mesh.*should match")
"""What JAX's errors about devices and meshes have in common."""

_A_LIST = (
    "jstep: the batch is a list, which is one argument; a tuple is several: give (x, y). With torch's DataLoader pass "
    "collate_fn=lambda rows: tuple(default_collate(rows)); map(tuple, loader) would lose the loader's position"
)


_A_CONTAINER = (
    "jstep: the batch is {0}, which is one argument; a tuple is several. Let the function take the batch as one and "
    "read {1} from it, or give tuples: ({2})"
)


def explain_one_argument(error: BaseException, args: Sequence[Any]) -> None:
    """Add a note to an error of a function of the batch if the batch is one argument and was meant as several.

    It is a list, such as torch's loader gives, or a dict, a NamedTuple or another container.

    Args:
        error: The error that the call raised.
        args: The arguments that the batch stands for.
    """
    if len(args) != 1 or not isinstance(error, TypeError | AttributeError):
        return
    batch = args[0]
    if isinstance(batch, list):
        note(error, _A_LIST)
    elif not jax.tree_util.all_leaves([batch]) and _wants_more_arguments(error):
        if isinstance(batch, Mapping):
            parts = [f"batch[{key!r}]" for key in batch]
        else:
            parts = [f"batch.{key}" for key in getattr(batch, "_fields", ())] or ["its parts"]
        note(error, _A_CONTAINER.format(kind(batch), " and ".join(parts[:3]), ", ".join(parts[:3])))


_MISSING_ARGUMENT = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def _missing_arguments(error: BaseException) -> list[str]:
    """The names of the arguments that a function was called without, if that is the error."""
    found = _MISSING_ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    return [] if found is None else re.findall(r"'(\w+)'", found[1])


def _wants_more_arguments(error: BaseException) -> bool:
    """Whether a function was called without arguments that a batch has, or not by their names."""
    return bool(set(_missing_arguments(error)) - set(_PASSED_WITH)) or bool(_TOO_MANY.search(str(error)))


_TOO_MANY = re.compile(r"takes \d+ positional arguments? but \d+ (?:was|were) given")  # others are keyword-only
_PASSED_WITH = {
    "rng": "rng=key",
    "averages": "use_averages=True",
    "model_state": "has_model_state=True",
}
"""Arguments of a loss → what `minimize` passes them with."""


def refuse_a_loss(
    step: Any, state: Any, args: Sequence[Any], cause: BaseException, argument: str = "train_step"
) -> None:
    """Raise an error if what was given as a training step, and failed, is a loss: a scalar function of the parameters.

    Args:
        step: The function, or a `TrainStep` of it.
        state: The state that it was called with.
        args: The other arguments, or their shapes.
        cause: The error that it raised.
        argument: The name of the argument, for the error.

    Raises:
        TypeError: It returns a floating-point scalar, alone or with something else, for the parameters of the state.
    """
    while isinstance(step, TrainStep):
        step = step.__wrapped__
    state = state_of(state)
    if isinstance(step, PureStep) or not isinstance(state, TrainState) or not _is_loss(step, state, args):
        return
    name = getattr(step, "__name__", "")
    name = name if name.isidentifier() else "loss_fn"
    raise TypeError(
        f"{argument}={name}: must be a training step (state, *args) -> (state, metrics), got a loss, which is a "
        f"function of the parameters; its step is jstep.minimize({name}, optimizer)"
    ) from cause


def _is_loss(fn: Callable[..., Any], state: TrainState, args: Sequence[Any]) -> bool:
    """Whether a function of the parameters and a batch returns a loss; it is traced, and runs nothing on a device."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # a built-in without a signature
        names = []
    passed = {"rng": jax.random.key(0), "averages": state.params}  # by `minimize`, if the loss takes them
    kwargs = {name: value for name, value in passed.items() if name in names}
    for first in ((state.params,), (state.params, state.model_state)):
        try:
            with using_mesh(mesh_of((state, args))):
                out = jax.eval_shape(fn, *first, *args, **kwargs)
        except Exception:
            continue
        loss = out[0] if isinstance(out, tuple | list) and len(out) == 2 else out
        return getattr(loss, "shape", None) == () and jax.numpy.issubdtype(loss.dtype, jax.numpy.floating)
    return False


def is_spent(state: Any) -> bool:
    """Return whether a state was donated to an earlier step."""
    step = getattr(state, "global_step", None)
    return isinstance(step, jax.Array) and not trees.is_traced(step) and step.is_deleted()


def explain(error: BaseException, state: Any, args: Any, *, was_spent: bool, donates: bool) -> None:
    """Raise a clearer error if the arguments reveal the cause, or add a note to `error`.

    Args:
        error: The error that JAX or the loss raised.
        state: The state passed to the step.
        args: The batch.
        was_spent: Whether the state was donated before the call; a call that fails while it runs also donates it.
        donates: Whether the step donates its state.

    Raises:
        FloatingPointError: JAX debugged a NaN in a step that had donated its state.
        RuntimeError: A leaf was donated to an earlier step.
        TypeError: A leaf of the parameters is not an array.
        ValueError: Two leaves of the state, or a leaf and an argument, share one buffer.
    """
    state = state_of(state)
    arrays = [x for x in jax.tree.leaves((state, args)) if isinstance(x, jax.Array) and not trees.is_traced(x)]
    if not isinstance(error, RuntimeError | ValueError):
        if type(error).__name__ == "ShardingTypeError" and all(len(x.sharding.device_set) == 1 for x in arrays):
            note(error, _CAPTURED)
        lacking = _missing_arguments(error)
        missing = [name for name in _PASSED_WITH if name in lacking]
        if lacking and not missing and isinstance(state, TrainState) and state.model_state is not None:
            missing = ["model_state"]
        for name in missing:
            note(error, f"jstep: if this is the loss, minimize(..., {_PASSED_WITH[name]}) passes {name} to it")
        if isinstance(error, TypeError):  # of JAX, about a whole module in place of its arrays
            argument, tree = ("params", state.params) if isinstance(state, TrainState) else ("state", state)
            trees.require_arrays(tree, argument, trees.keep_arrays(argument))
        explain_jax(error)
        return
    if was_spent or not is_spent(state):
        require_alive(state, error)
        if donates:
            refuse_shared_buffers(state, args, error)
    elif _is_of_a_nan(error):
        raise FloatingPointError(
            "the step produced a NaN or an infinity, and JAX can no longer locate it, because the state passed to the "
            "step is donated. Set jax_debug_nans before the first step of the run, which then donates nothing, or call "
            "jstep.find_nonfinite(train_step, state, ...)"
        ) from error
    where = {
        leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else frozenset(leaf.sharding.device_set)
        for leaf in arrays
        if leaf.committed
    }
    if len(where) > 1:
        note(error, _ON_ONE_MESH)
    elif _OF_DEVICES.search(str(error)):
        note(error, _CAPTURED)


def _is_of_a_nan(error: BaseException | None) -> bool:
    """Return whether JAX raised the error while debugging a NaN."""
    while error is not None and "FloatingPoint" not in type(error).__name__:
        error = error.__context__
    return error is not None


def refuse_shared_buffers(
    state: Any, args: Any, cause: BaseException | None = None, *, by_identity: bool = False
) -> None:
    """Reject a state that cannot be donated, because one buffer would be donated twice or used elsewhere.

    For arrays on one device, JAX reports this without their names; for arrays on a mesh, the process crashes.

    Args:
        state: The state to be donated.
        args: The other arguments of the step.
        cause: The error that JAX raised, if any.
        by_identity: Whether the leaves of the state are known to share no buffers, so that it suffices to look for
            its arrays among `args`.

    Raises:
        ValueError: Two leaves share one buffer.
    """
    if by_identity:
        given = {id(leaf) for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)}
        if not given or given.isdisjoint(map(id, jax.tree.leaves(state))):
            return
    seen: dict[Any, str] = {}
    for path, leaf in trees.leaves_with_paths(state):
        buffer = _buffer(leaf)
        if buffer is not None and seen.setdefault(buffer, path) != path:
            raise ValueError(
                f"state: {seen[buffer]!r} and {path!r} share one buffer, which a compiled step cannot donate twice; "
                f"copy one of them: jnp.copy(state.{path.split('/')[0]}…)"
            ) from cause
    for path, leaf in trees.leaves_with_paths(args):
        buffer = _buffer(leaf)
        if buffer in seen:
            raise ValueError(
                f"state: {seen[buffer]!r} and the step's argument {path!r} share one buffer, which a compiled step "
                "cannot both donate and read; pass a copy (jnp.copy), or create the step with donate=False"
            ) from cause


def _buffer(leaf: Any) -> Any:
    """Return an identifier of the memory of an array; None if it has none on this process."""
    if not isinstance(leaf, jax.Array) or trees.is_traced(leaf) or leaf.is_deleted() or not leaf.size:
        return None
    leaf = trees.key_data(leaf)
    if not leaf.sharding.addressable_devices:
        return None
    part = leaf.addressable_data(0)
    try:
        return next(iter(part.devices())), part.unsafe_buffer_pointer()
    except Exception:  # a backend without buffer pointers
        return id(leaf)


# The compiled training step, which donates its state.

UNKNOWN, NAMED, FLAT, BOTH = "unknown", "named", "flat", "both"
"""The forms of the state that a step is compiled for: a `TrainState`, as in calls by hand, and a `FlatState`."""
_SMALL = 100_000
"""The most numbers in a state whose step may be compiled for both forms."""

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
        optimizer: The optimizer whose update the step makes, for a step of `minimize`; None for any other.
        trains: `trains(params)`: whether the step trains each leaf, in order; None if that is not known.
        kept: What others have computed of the step, by names of their own, and need not compute again.
    """

    parts: Parts
    _: dataclasses.KW_ONLY
    name: str = "train_step"
    title: str = ""
    looks_at_rows: bool = False
    leading_axes: int = 0
    lanes: int | None = None
    optimizer: Optimizer | None = None
    trains: Callable[[Params], list[bool]] | None = None
    kept: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name
        self.title = self.title or self.name

    @shortens_tracebacks
    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """Run one step."""
        refuse_shapes((state, args), "state and batch")
        trees.refuse_wide(trees.batch_of(args), "batch")
        with using_mesh(mesh_of((state, args))):
            return whole(self.parts, state, args, self.batch_specs(args))

    def batch_specs(self, args: tuple[Any, ...]) -> Any:
        """Return the shardings of a batch; None if the step ignores them or the batch is on no mesh."""
        if not self.looks_at_rows or mesh_of(args) is None:
            return None
        return jax.tree.map(lambda leaf: None if trees.is_traced(leaf) else getattr(leaf, "sharding", None), args)

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


def minimized(step: Any) -> PureStep | None:
    """The pure function of a step of `minimize`, compiled or not, or of its loop over steps; None for any other."""
    while isinstance(step, TrainStep):
        step = step.__wrapped__
    return step if isinstance(step, PureStep) and step.optimizer is not None else None


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
        self._agreed = AgreedShapes()
        # The last returned state, its program and its mesh, in one attribute so that threads see a consistent triple.
        self._latest: tuple[Callable[[], Any], Any, Any] = (lambda: None, None, None)
        self._keeps_roles = True
        # The forms of the state that the step is compiled for; UNKNOWN before its first call.
        self._forms = UNKNOWN

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
            parts = self._pure.parts if kind == "call" else functools.partial(whole, self._pure.parts)

            def function(state: Any, *args: Any) -> Any:
                if type(state) is not FlatState:
                    return traced(parts, shardings, state, args, batch_specs)
                new, *others = traced(parts, shardings, state.named(), args, batch_specs)
                return state.followed_by(new), *others

            function.__name__ = function.__qualname__ = self.__name__
            # Otherwise XLA may choose another sharding for an output than for its input, which prevents donation and
            # recompiles the step for its own result.
            others = self._other_shardings(shardings) if kind == "call" else (None,)
            where: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, *others)}
            self._programs[key] = jax.jit(function, donate_argnums=(0,) if donate else (), **where)
        return self._programs[key]

    @shortens_tracebacks
    def __call__(self, state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
        """Call the compiled step."""
        trees.refuse_wide(trees.batch_of(args), "batch")
        if not is_single_process():
            self._agreed.check(state, args)
        new, metrics, constants = self.run(self.carried(state) if self._forms == FLAT else state, *args)
        if constants.values:
            metrics.update(constants.arrays)
        return state_of(new), metrics

    def run(self, state: Any, *args: Any) -> tuple[Any, Any, Constants]:
        """Call the compiled step; return the metrics that it computed and the constant ones apart.

        The state may be a `FlatState`, and the new one then is, too, unless the batch put it on a mesh.
        """
        last, program, mesh = self._latest
        # The state that this step last returned has the same sharding as before; only others are inspected.
        named = state_of(state)
        is_latest = last() is state and program is not None and not (mesh is not None and trees.is_donated(named))
        if not is_latest:
            if (copied := trees.owned(named)) is not named:
                state = named = copied
            refuse_shapes((named, args), "state and batch")
            trees.refuse_wide(named, "state")  # of a state that was made by hand
            self._settle(named, NAMED if state is named else FLAT)
        if not is_latest or self._pure.looks_at_rows:
            program, mesh = self._for(named, args), mesh_of((named, args))
            if mesh is not None and mesh_of(named) is not None:
                state = named
        if mesh is not None and self.donate and not _debugs():
            refuse_shared_buffers(named, args, by_identity=is_latest)
        if mesh is None:
            new, metrics, constants = self._run(program, state, args)
        else:
            with using_mesh(mesh):
                new, metrics, constants = self._run(program, state, args)
        self._constants = constants
        made = new.named() if type(new) is FlatState else new
        kept = keep_roles(named, made)  # the step may have been compiled for a state made by hand
        if isinstance(kept, TrainState):
            mesh = mesh_of(kept.global_step) if mesh is None and not is_latest else mesh
            self._keeps_roles = kept is made
            if type(new) is FlatState and mesh is None:  # the batch may have put it on a mesh
                kept = new if self._keeps_roles else FlatState.of(kept)
            self._latest = weakref.ref(kept), program, mesh
        return kept, metrics, constants

    def carried(self, state: Any) -> Any:
        """Return what a run hands to the calls of this step in place of a state: a `FlatState`, or the state itself.

        It is the state for one on a mesh, whose errors and shardings need its names, and for a step that does not
        donate it. It may be one of shapes.
        """
        last, _, mesh = self._latest
        if mesh is not None and last() is state:
            return state
        if not self.donate or self._pure.looks_at_rows or self._forms == NAMED or mesh_of(state) is not None:
            return state_of(state)
        if type(state) is FlatState:
            return state.current()
        if not isinstance(state, TrainState):
            return state
        self._settle(state, FLAT)
        return FlatState.of(state)

    def _settle(self, state: Any, form: str) -> None:
        """Decide, at the first call, whether the step is compiled for one form of the state, or for both.

        By hand and in a run, the step of a small state is called with the form that is quicker there. That of a large
        one takes too long to compile twice, and to run, for the few microseconds to matter.
        """
        if self._forms == UNKNOWN and not any(map(trees.is_traced, jax.tree.leaves(state))):
            is_small = sum(np.size(leaf) for leaf in jax.tree.leaves(state)) <= _SMALL
            self._forms = BOTH if is_small else form

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

    def _run(self, program: Any, state: Any, args: tuple[Any, ...]) -> Any:
        was_spent = is_spent(state)
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

    @shortens_tracebacks
    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args, "whole").lower(state, *args)

    @shortens_tracebacks
    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args, "whole").trace(state, *args)

    def traced_call(self, state: TrainState, *args: Any) -> Any:
        """Return the trace of the program that a call of a run runs; once it is compiled, that does not recompile."""
        with using_mesh(mesh_of((state, args))):
            return self._for(state, args).trace(self.carried(state), *args)

    @shortens_tracebacks
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
