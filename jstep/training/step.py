"""The compiled train step, the kind of state that it returns, and the layout it is compiled for."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import device_values, meshes, trees
from jstep.core.agreed_shapes import AgreedShapes
from jstep.core.checks import as_bool, as_function, describe_type
from jstep.core.exceptions import setting
from jstep.core.placement import SHARDINGS, check_no_shapes, sharding_of
from jstep.core.processes import is_single_process
from jstep.core.public_names import explains_attributes
from jstep.core.recorded_calls import RecordedCall, record_calls
from jstep.core.threads import TRACING, doing
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Optimizer, P, Tree
from jstep.slots.matching import describe_difference
from jstep.slots.roles import roles_in
from jstep.state.global_step import check_alive, step_array
from jstep.state.train_state import TrainState
from jstep.training.explain import call_custom_step, check_will_not_crash, explain
from jstep.training.metrics import SKIPPED, StepMetrics, flat_metrics, split_metrics
from jstep.training.optimizer_metrics import constants_of, report
from jstep.training.skipped_updates import mark_guards, restore_guards
from jstep.training.watched_updates import join_updates, known_compiled, note_step, watch_updates

_P = ParamSpec("_P")
_T = TypeVar("_T")

Body = Callable[[Any, tuple[Any, ...], Any], Any]
"""`body(state, args, batch_specs) -> (state, StepMetrics)`; the specs are shardings, or None."""


@dataclasses.dataclass(eq=False, repr=False)
class PureStep:
    """A train step as a pure function, `state, metrics = step(state, *args)`.

    It is neither compiled nor donating.

    Attributes:
        body: As it was given; it also checks the kind of the new state.
        depends_on_rows: Whether the step depends on the sharding of the rows.
        leading_axes: The number of batch axes before the rows.
        increments: Whether it increments the global step; None if that is not known.
        made_by: The call of `minimize` or `scan_steps` that made it.
    """

    body: Body
    _: dataclasses.KW_ONLY
    name: str = "train_step"
    title: str = ""
    depends_on_rows: bool = False
    leading_axes: int = 0
    lanes: int | None = None
    optimizer: Optimizer | None = None
    increments: bool | None = None
    made_by: RecordedCall | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = self.name
        self.title = self.title or self.name
        self.body = functools.partial(_call_and_keep_kind, self.title, self.body)

    def __repr__(self) -> str:
        return f"<jstep.PureStep {self.description}>"

    @property
    def description(self) -> str:
        """The title, and the call that makes the optimizer."""
        if self.optimizer is None:
            return self.title
        return f"{self.title}, {self.optimizer!r}"

    @shortens_tracebacks
    def __call__(self, state: TrainState[P], *args: Any) -> tuple[TrainState[P], dict[str, Any]]:
        check_no_shapes((state, args), "state and batch")
        args = device_values.prepare_arguments(args)
        with meshes.using_mesh(meshes.mesh_of((state, args))):
            return merge_constants(self.body, state, args, self.batch_specs(args))

    def batch_specs(self, args: tuple[Any, ...]) -> Any:
        """Return the shardings of a batch; None if the step ignores them."""
        if not self.depends_on_rows or meshes.mesh_of(args) is None:
            return None
        return jax.tree.map(sharding_of, args)

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.made_by is not None, "users have no others"
        return as_pure_step, (self.made_by,)


def _call_and_keep_kind(
    title: str, body: Body, state: Tree, args: tuple[Any, ...], batch_specs: Tree
) -> Any:
    new, *others = body(state, args, batch_specs)
    return keep_kind(title, state, new), *others


def as_pure_step(step: Callable[..., Any]) -> PureStep:
    if isinstance(step, PureStep):
        return step
    if isinstance(step, TrainStep):
        return step._pure
    name = getattr(step, "__name__", "train_step")
    fallback = meshes.AxesFallback(name)

    def body(state: Tree, args: tuple[Any, ...], batch_specs: Tree) -> tuple[Any, StepMetrics]:
        def call_user_step(state: Tree, args: tuple[Any, ...]) -> Any:
            result = call_custom_step(step, state, *args)
            _check_user_result(result, state)
            return result

        marked, guard_slots = mark_guards(state)
        structure = trees.structure(state)
        with watch_updates(marked) as found:
            new, metrics = fallback(
                call_user_step, marked, args, specs_of=meshes.shard_like((state,))
            )
        # The step may call a function that the user compiled. If it was traced for another program,
        # its updates are not seen here.
        updates = join_updates(known_compiled(step, structure), found.made_to(structure))
        new, metrics = restore_guards(guard_slots, new, flat_metrics(metrics))
        hyperparameters: Mapping[str, Any] = {}
        if isinstance(metrics, dict):
            reported = report(updates, step_array(state), roles_in(state), state.slots)
            hyperparameters = reported.hyperparameters
            constants = constants_of(step, metrics.keys() & hyperparameters.keys(), marked, args)
            metrics = {**reported.slot_values, **hyperparameters, **metrics, **constants}
        # A user-defined step reports a skipped update with a metric of the same name as jstep's.
        is_guarded = isinstance(metrics, dict) and SKIPPED in metrics
        split = split_metrics(metrics, SKIPPED if is_guarded else None, hyperparameters)
        # Unlike JAX's, its error of an integer beyond 32 bits names the metric.
        computed = device_values.prepare_for_device(split.computed, "metrics")
        return new, split._replace(computed=computed)

    return PureStep(body, name=name)


def _check_user_result(result: Any, state: Tree) -> None:
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if is_pair:
        if not isinstance(state, TrainState):
            return
        if isinstance(result[0], TrainState) and isinstance(result[1], Mapping):
            return
    returned = " and ".join(map(describe_type, result)) if is_pair else describe_type(result)
    raise TypeError(
        f"the step returned {returned}; it must return (state, metrics), "
        "as jstep.minimize(loss_fn, …) does"
    )


def _remember_call(step: Any, call: RecordedCall) -> Any:
    as_pure_step(step).made_by = call
    return step


def makes_step() -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return the decorator of functions that make a step, whose repr is the call.

    A decorated function keeps its type.
    """
    return record_calls(_remember_call)


def step_function(step: object) -> PureStep | None:
    """Return the pure function of a step of `minimize`, compiled or not, or of its loop."""
    pure_step = step._pure if isinstance(step, TrainStep) else step
    if isinstance(pure_step, PureStep) and pure_step.optimizer is not None:
        return pure_step
    return None


def merge_constants(
    body: Body, state: Tree, args: tuple[Any, ...], batch_specs: Tree
) -> tuple[Any, Any]:
    state, metrics = body(state, args, batch_specs)
    return state, metrics.merged()


# A step returns a state of the same kind as its argument: roles, structure, shapes and dtypes.


def keep_kind(name: str, old: Tree, new: Tree) -> Any:
    """Return a step's state with the roles of its argument; raise if it is of another kind."""
    if not (isinstance(old, TrainState) and isinstance(new, TrainState)):
        return new
    if roles_in(new) is not roles_in(old):
        new = TrainState(new.params, new.slots, new.global_step, roles=roles_in(old))
    has_structure = trees.structure(new) == trees.structure(old)
    if has_structure and any(map(trees.is_weak, jax.tree.leaves(new))):
        new = jax.tree.map(_as_strong, new, old)
    # In a trace, NumPy's float64 becomes a float32. A step that is not traced returns it unchanged,
    # and it is saved as float64.
    type_of = jax.typeof if trees.has_tracers(old) else _exact_type
    if has_structure:
        pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        if all(_is_alike(new_leaf, old_leaf, type_of) for new_leaf, old_leaf in pairs):
            return new
    trees.check_arrays(new, f"train_step={name}: the state that it returns")
    different = describe_difference(jax.tree.map(type_of, new), jax.tree.map(type_of, old))
    raise TypeError(
        f"train_step={name}: must return a state of the structure, shapes and dtypes of its "
        f"argument, got one {different or _describe_container(new, old)}; cast such a leaf, "
        "or create the state as it is returned: otherwise no run could resume from its checkpoints"
    )


def _describe_container(new: Any, old: Any, path: tuple[Any, ...] = ()) -> str:
    if type(new) is not type(old):
        return (
            f"whose {trees.path_str(path)!r} is of type {type(new).__name__} instead of "
            f"{type(old).__name__}"
        )
    for (keys, new_child), (_, old_child) in zip(_children(new), _children(old), strict=True):
        if trees.structure(new_child) != trees.structure(old_child):
            return _describe_container(new_child, old_child, (*path, *keys))
    return f"whose {trees.path_str(path)!r} has other static fields"


def _children(tree: Any) -> list[tuple[Any, Any]]:
    """Return the subtrees one level below, each with its key."""
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)


def _as_strong(new: Any, old: Any) -> Any:
    """Return a weak value as one of the old dtype, or of its own if that would lose some of it."""
    if not trees.is_weak(new):
        return new
    dtype = jax.typeof(old).dtype
    with jax.numpy_dtype_promotion("standard"):
        promoted = jnp.result_type(new, dtype)
    return jnp.asarray(new, dtype if promoted == dtype else jax.typeof(new).dtype)


def _is_alike(new: Any, old: Any, type_of: Callable[[Any], Any]) -> bool:
    if not trees.is_array_or_number(new):
        return False
    new_type = type_of(new)
    old_type = type_of(old)
    return (new_type.shape, new_type.dtype) == (old_type.shape, old_type.dtype)


def _exact_type(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype.newbyteorder("="))
    return jax.typeof(leaf)


# A step stores the layout on the state that it returns, so that the next call inspects no leaves.


class StateLayout:
    """The shardings of a state and their mesh; both None if it is on one device."""

    def __init__(self, shardings: Tree = None, mesh: Any = None) -> None:
        self.shardings = shardings
        self.mesh = mesh


_NO_MESH = StateLayout()
_LAYOUTS: "weakref.WeakValueDictionary[Any, StateLayout]" = weakref.WeakValueDictionary()


def inspect_layout(state: Tree) -> StateLayout:
    mesh = meshes.mesh_of(state)
    if mesh is None:
        return _NO_MESH
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves, treedef = trees.flatten(state)
    shardings: list[NamedSharding] = []
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        shardings.append(sharding if isinstance(sharding, NamedSharding) else everywhere)
    return _LAYOUTS.setdefault(
        (treedef, tuple(shardings)), StateLayout(treedef.unflatten(shardings), mesh)
    )


def place_result(new: Any, layout: StateLayout, *, donated: bool) -> Any:
    if not isinstance(new, TrainState):
        return new
    step = new.global_step
    if not isinstance(step, jax.Array) or isinstance(step, jax.core.Tracer):
        return new
    if layout.mesh is not None:
        # `call_step` does not check a state with a layout for shared memory. If the old state was
        # donated, no leaf shares memory with another, or with the old state.
        may_be_stored = donated
    else:
        # A batch on a mesh moves the state there.
        may_be_stored = type(step.sharding) is not NamedSharding
    if may_be_stored:
        object.__setattr__(new, "_layout", layout)  # a TrainState is frozen
    return new


@explains_attributes
class TrainStep:
    """A compiled train step: `state, metrics = train_step(state, *args)`.

    The state passed in is donated (unless `donate=False`): use only the returned one. Every leaf
    keeps its sharding, and the step is traced under the mesh of the state. The methods of `jax.jit`
    functions are available.

    Args:
        step: The function to compile, `(state, *args) -> (state, metrics)`. The new state has the
            structure, shapes and dtypes of the old one. Metrics are any mapping; nested ones are
            returned flat, by their path: `world/kl`. One that is a plain Python or NumPy number is
            a constant of the program.
        donate: Whether a call donates the state.

    Attributes:
        __wrapped__: The pure function that is compiled.
        title: A name that identifies the step within a run: for a step of `minimize`, the name of
            its loss.
        lanes: The number of lanes, as in `minimize`; None without lanes.

    Raises:
        TypeError: `step` is not a function, or `donate` is not a bool; from a call: it returns
            another kind of state.
    """

    _returns_sums = False
    """Whether the programs also return sums, as in a `LoopedStep`."""

    def __init__(
        self, step: Callable[..., tuple[TrainState, dict[str, Any]]], *, donate: bool = True
    ) -> None:
        self.__wrapped__ = as_function(step, "step", "(state, *args) -> (state, metrics)")
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = type(self).__doc__
        if not isinstance(step, PureStep) and step.__doc__:
            self.__doc__ = step.__doc__
        self.donate = as_bool(donate, "donate")
        self._pure = as_pure_step(step)
        self.title = self._pure.title
        self.lanes = self._pure.lanes
        self._programs: dict[Any, Any] = {}
        self._agreed = AgreedShapes()

    @shortens_tracebacks
    def __call__(self, state: TrainState[P], *args: Any) -> tuple[TrainState[P], dict[str, Any]]:
        """Return the state after one more step, and its metrics."""
        args = device_values.prepare_arguments(args)
        if getattr(state, "_layout", None) is not _NO_MESH and not is_single_process():
            self._agreed.check(state, args)
        note_step(self._pure.optimizer, state)
        new, metrics = call_step(self, state, args)
        return new, metrics.merged()

    def _program(
        self, layout: StateLayout, args: tuple[Any, ...], kind: str = "call", *, donates: bool
    ) -> Any:
        """Return the program for some layouts.

        `kind="call"` returns `StepMetrics`, `kind="merged"` all metrics in one dict.
        """
        batch_specs = self._pure.batch_specs(args)
        specs: tuple[Any, ...] = ()
        if batch_specs is not None:
            specs = (trees.structure(batch_specs), *jax.tree.leaves(batch_specs))
        key = kind, donates, layout, *specs
        if key not in self._programs:
            self._programs[key] = self._make_program(kind, donates, layout, batch_specs)
        return self._programs[key]

    def _make_program(
        self, kind: str, donates: bool, layout: StateLayout, batch_specs: Tree
    ) -> Any:
        body = self._pure.body
        if kind != "call":
            body = functools.partial(merge_constants, body)
        shardings = layout.shardings

        def traced(state: Tree, *args: Any) -> Any:
            with setting(SHARDINGS, shardings), doing(TRACING):  # only JAX calls this
                return body(state, args, batch_specs)

        # JAX shows this name in its errors.
        traced.__name__ = traced.__qualname__ = self.__name__
        options: dict[str, Any] = {}
        if shardings is not None:
            # Otherwise XLA may choose another sharding for an output than for its input, which
            # prevents donation and recompiles the step for its own result.
            out_shardings = [shardings, None]
            if self._returns_sums:
                out_shardings.append(NamedSharding(layout.mesh, PartitionSpec()))
            options["out_shardings"] = tuple(out_shardings)
        return jax.jit(traced, donate_argnums=(0,) if donates else (), **options)

    @shortens_tracebacks
    def lower(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).lower`."""
        with meshes.using_mesh(meshes.mesh_of((state, args))):
            return self.trace(state, *args).lower()

    @shortens_tracebacks
    def trace(self, state: TrainState, *args: Any) -> Any:
        """As `jax.jit(...).trace`."""
        return trace_program(self, state, device_values.prepare_arguments(args), "merged")

    @shortens_tracebacks
    def eval_shape(self, state: TrainState, *args: Any) -> Any:
        """Return the shapes of the new state, with its shardings, and of all metrics."""
        return self.trace(state, *args).out_info

    def clear_cache(self) -> None:
        """Clear the compiled programs, as `jax.jit(...).clear_cache`."""
        for program in self._programs.values():
            program.clear_cache()

    def _cache_size(self) -> int:
        return sum(int(program._cache_size()) for program in self._programs.values())

    def __repr__(self) -> str:
        return f"<jstep.TrainStep {self._pure.description}, donate={self.donate}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(TrainStep, donate=self.donate), (self.__wrapped__,)


# All calls of a compiled step: by hand, in `train`, in `replay` and in `verify_resume`.


def call_step(step: TrainStep, state: Tree, args: tuple[Any, ...]) -> Any:
    """Call the program of a step; return `(state, StepMetrics)`, for a `LoopedStep` also its sums.

    The fast path is that of a state that a step returned, which carries its layout. On one device,
    and with JAX's usual settings, only its global step is inspected, which shows whether the state
    was donated, and the program is called without contexts.
    """
    layout = getattr(state, "_layout", None)
    is_returned = layout is not None
    if layout is None:  # created or changed by the user
        state = device_values.prepare_for_device(trees.copy_numpy(state, "state"), "state")
        check_no_shapes((state, args), "state and batch")
        layout = inspect_layout(state)
        is_donated = trees.is_donated(getattr(state, "global_step", None))
    else:
        is_donated = state.global_step.is_deleted()
    if is_donated:
        check_alive(state)  # a call that fails while it runs donates it, too
    transfers = meshes.NO_GUARD
    mesh = layout.mesh
    donates = step.donate
    if any(meshes.special_settings(jax.config)):
        transfers = meshes.internal_transfers()
        donates = _donates(step)
    program = None
    if not step._pure.depends_on_rows:
        # What `_program` would return, without calling it at each step.
        program = step._programs.get(("call", donates, layout))
    if program is None:
        program = step._program(layout, args, donates=donates)
    if mesh is None and not is_returned:
        mesh = meshes.mesh_of(args)
    if mesh is not None:
        check_will_not_crash(state, args, is_known=is_returned, donates=donates)
    try:
        if mesh is None and transfers is meshes.NO_GUARD:
            # Entering empty contexts would add 5 % to a small step.
            new, metrics, *others = program(state, *args)
        else:
            with meshes.using_mesh(mesh):
                if transfers is not meshes.NO_GUARD:
                    # The guard applies to the loss, which is traced here, but not to batches of
                    # NumPy arrays.
                    program.trace(state, *args)
                with transfers:
                    new, metrics, *others = program(state, *args)
    except Exception as error:
        explain(error, state, args, donates=donates)
        raise
    return place_result(new, layout, donated=donates), metrics, *others


def trace_program(step: TrainStep, state: Tree, args: tuple[Any, ...], kind: str = "call") -> Any:
    """Return the trace of the program that `call_step` calls, for arrays or shapes."""
    with meshes.using_mesh(meshes.mesh_of((state, args))):
        return jitted_program(step, state, args, kind).trace(state, *args)


def jitted_program(step: TrainStep, state: Tree, args: tuple[Any, ...], kind: str = "call") -> Any:
    """Return the function of `jax.jit` that a step calls, for arrays or shapes."""
    layout = getattr(state, "_layout", None)
    if layout is None:
        layout = inspect_layout(state)
    return step._program(layout, args, kind, donates=_donates(step))


def _donates(step: TrainStep) -> bool:
    # JAX reruns a step that made a NaN, operation by operation, which requires its inputs.
    flags: Any = jax.config
    return step.donate and not (flags.jax_debug_nans or flags.jax_debug_infs)
