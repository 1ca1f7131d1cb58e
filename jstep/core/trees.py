"""Types of parameters, slots, updates and optimizers; leaves and their paths; stacking of trees."""

import collections
import dataclasses
import difflib
import itertools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from jstep.core.checks import describe_type, format_value
from jstep.core.public_names import explains_attributes
from jstep.core.recorded_calls import RecordedCall, as_typed

# Core types: optimizers, schedules, type variables; aliases of params, updates, slots and steps.

if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:

    def TypeVar(name, default=None):  # noqa: N802  (before Python 3.13 type variables have no defaults)
        return typing.TypeVar(name)


P = TypeVar("P", default=Any)
"""The type of the parameters."""
T = TypeVar("T")
"""The type of an argument that is returned with the same structure."""
Array: TypeAlias = jax.Array
Tree: TypeAlias = Any
Params: TypeAlias = Any
"""Any pytree of arrays; None and integer leaves are passed through unchanged."""
Updates: TypeAlias = Any
"""A tree like the parameters; a leaf is an array, an `IndexedSlices`, or None (no update)."""
Slots: TypeAlias = dict[str, Any]
"""Slot name → tree with the structure of the parameters, or a scalar."""
Step: TypeAlias = int | np.integer[Any] | Array
"""A number of training steps completed: an integer or an integer scalar array."""
Number: TypeAlias = float | int | np.number[Any] | Array


class Schedule(Protocol):
    """A function from the global step to a scalar."""

    def __call__(self, step: Step, /) -> Array:
        """Return the value at `step`."""


@dataclasses.dataclass(frozen=True, repr=False)
class Held:
    """A hyperparameter in the state, which Optax calls injected; `held` makes it."""

    name: str
    value: Any

    def __repr__(self) -> str:
        return f"held({self.name!r}, {as_typed(self.value)})"


ScalarOrSchedule: TypeAlias = Number | Schedule | Callable[[Any], Any] | Held


class GradientNoise(NamedTuple):
    """Gradient noise, estimated from the microbatches of one step; NaN if it cannot be estimated.

    Attributes:
        noise: The trace of the covariance of one example's gradient.
        square: The squared norm of the true gradient; it may be negative.
    """

    noise: Array
    square: Array


class Context(NamedTuple):
    """Additional inputs of an optimizer's update, such as the loss; unknown fields are None.

    `minimize` creates it for optimizers with `takes_context=True`; `apply_gradients(...,
    context=...)` accepts it. Below a label of `partition`, `value_and_grad` accepts the parameters
    of that label.

    Attributes:
        loss: The loss of this step, a scalar; not multiplied by a loss scale.
        value_and_grad: `value_and_grad(params) -> (loss, gradients)`, the same loss on the same
            batch with the same PRNG key, at other parameters.
        key: A PRNG key that depends only on the step, and differs from the key of the loss; None
            without `rng`.
        noise: The gradient noise of this step, for `with_noise_scale`; only with
            `metrics=("noise_scale",)`.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def update(updates, slots, params, step, context):
        ...     squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(updates))
        ...     return jax.tree.map(lambda g: -context.loss / squares * g, updates), {}
        >>> polyak = jstep.Optimizer(
        ...     lambda params, global_step=0: {}, update, lambda step: {}, takes_context=True
        ... )
        >>> state = jstep.TrainState.create({"w": 4.0}, polyak)
        >>> state, _ = jstep.minimize(lambda params: params["w"] ** 2, polyak)(state)
        >>> print(state.params["w"])
        2.0
    """

    loss: Array | None = None
    value_and_grad: Callable[[Any], tuple[Array, Any]] | None = None
    key: Array | None = None
    noise: GradientNoise | None = None


EMPTY_CONTEXT = Context()


UpdateFn: TypeAlias = Callable[..., tuple[Updates, Slots]]
"""`update(updates, slots, params, step) -> (updates, slots)`, a pure function: see `Optimizer`."""


@explains_attributes
class Optimizer(NamedTuple):
    """An optimizer: three pure functions, `init`, `update` and `hyperparameters`.

    Most custom optimizers are easier to write with `jstep.from_direction` or `jstep.leafwise`.

    Arguments of `update`:

    - updates: the gradients, or the updates of the previous element of a chain, a tree like params.
      A leaf is an array of any floating dtype, an `IndexedSlices` (rows of a table), or None: keep
      the parameter and its slots.
    - slots: the slots by name, perhaps also those of other optimizers.
    - params: may include None and integer leaves, which have no gradient, and float16 and bfloat16
      leaves, whose slots and arithmetic should be in float32.
    - step: the number of training steps completed, an integer scalar, traced or not.

    Results of `update`:

    - updates: a tree like params, with None for no update. They are *added* to the parameters in
      float32 or wider; the optimizer applies the sign.
    - slots: only its own slots, with the same names, structure, shapes and dtypes. A slot is a tree
      like params (None for a leaf without a slot) or a scalar. Arrays created by `init` must be
      distinct buffers.

    Attributes:
        init: `init(params, global_step=0) -> slots`. A scalar slot that holds the global_step at
            which the slots were created is declared by `init.ages = ("start_step",)`: their age,
            step + 1 − slot, then counts applied updates only. A copy of the parameters, which a
            partial restore copies anew, is detected, or declared by `init.copies = ("slow",)`. An
            average of the parameters, for `averaged_params` and `use_averages`, is declared by
            `init.averages = ("target",)`.
        update: `update(updates, slots, params, step) -> (updates, slots)`; with `takes_context`, a
            `Context` is its fifth argument.
        hyperparameters: `hyperparameters(step) -> {name: scalar}`, the values at a step; plain
            numbers are constants. The name `learning_rate` indicates that the updates are final.
        takes_context: Whether `update` accepts a `Context`.

    An optimizer is pickled as the call that made it, as are schedules, steps and evaluators.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> def update(updates, slots, params, step):
        ...     return jax.tree.map(lambda g: -0.5 * jnp.sign(g), updates), {}
        >>> sign = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})
        >>> state = jstep.TrainState.create({"w": 1.0}, sign)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, sign).params["w"])
        0.5
    """

    init: Callable[..., Slots]
    update: UpdateFn
    hyperparameters: Callable[[Any], dict[str, Any]]
    takes_context: bool = False

    def __repr__(self) -> str:
        call = getattr(self.init, "call", None)
        if isinstance(call, RecordedCall):
            return repr(call)
        return f"Optimizer({', '.join(map(as_typed, self))})"

    def __deepcopy__(self, memo: object) -> "Optimizer":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        call = getattr(self.init, "call", None)
        if not isinstance(call, RecordedCall):
            return Optimizer, tuple(self)
        # After `_replace` the call would make another optimizer than this one.
        if call.made is None or any(map(operator.is_not, self, call.made)):
            raise TypeError(
                f"{call!r}: cannot be pickled, as its functions were replaced; pass what it is "
                "made of instead"
            )
        return call.__reduce__()


class Transformation(Protocol):
    @property
    def init(self) -> Callable[..., Any]:
        """Return `init(params) -> state`."""

    @property
    def update(self) -> Callable[..., Any]:
        """Return `update(updates, state, params) -> (updates, state)`."""


OptimizerLike: TypeAlias = Optimizer | Transformation
"""The type of optimizer arguments; an Optax transformation stands for `from_optax` of it."""


# Tree utilities: paths, leaves, and errors that name leaves.
#
# The path of a leaf is its keys joined by `/`, in predicates, slots, checkpoints and summaries.


def path_str(keys: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf)


def structure(tree: Tree) -> Any:
    return jax.tree.structure(tree)


def quote_path(path: str) -> str:
    return repr(path) if path else "the tree itself (a single leaf)"


def leaf_at(path: str) -> str:
    return f"the leaf at {path!r}" if path else "the array"


def leaves_with_paths(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    return [
        (path_str(keys), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]


def ids(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Number equal paths: the leaves of {'a': {'b': x}, 'a/b': y} share one."""
    numbers: dict[str, Iterator[int]] = collections.defaultdict(lambda: itertools.count(1))
    return [(path, next(numbers[path])) for path in paths]


def leaf_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    return [path for path, _ in leaves_with_paths(tree, is_leaf)]


def only_in(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    excluded = set(others)
    return [path for path in paths if path not in excluded]


def is_plain_tuple(x: object) -> bool:
    return isinstance(x, tuple) and not hasattr(x, "_fields")


def batch_to_args(batch: Tree) -> tuple[Any, ...]:
    return batch if is_plain_tuple(batch) else (batch,)


def args_to_batch(args: tuple[Any, ...]) -> Any:
    return args[0] if len(args) == 1 else args


def is_none(x: object) -> bool:
    """Whether a gradient is empty: None, or the float0 that JAX returns for integer inputs."""
    return x is None or (isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0)


def is_trainable(leaf: object) -> bool:
    return is_floating(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


def is_floating(dtype: DTypeLike) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_array(x: object) -> bool:
    """Whether x is an array, traced or not, or a NumPy scalar, and not masked."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return False
    return not isinstance(x, np.ma.MaskedArray)


def is_python_number(x: object) -> bool:
    """Whether x is a Python number; `np.float64`, a subclass of float, is an array."""
    return isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)


def is_weak(x: object) -> bool:
    """Whether x has the weak type of a Python number; keys have no such attribute."""
    if is_python_number(x):
        return True
    return isinstance(x, jax.Array) and bool(getattr(x, "weak_type", False))


def is_array_or_number(x: object) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind in "biufcV" and is_array(x)  # no strings, dates or objects
    return isinstance(x, jax.Array | bool | int | float | complex)


def not_an_array(leaf: object, path: str, what: str, remedy: str = "") -> TypeError:
    # `describe_type` describes anything with a shape and a dtype as an array, also tensors of other
    # libraries.
    if isinstance(leaf, np.ma.MaskedArray):
        return TypeError(f"{what}: {leaf_at(path)} is {describe_type(leaf)}")
    whose = f"of type {type(leaf).__name__}" if hasattr(leaf, "dtype") else describe_type(leaf)
    description = f"{what}: the leaf at {quote_path(path)} is {whose}, {format_value(leaf, 60)}"
    return TypeError(f"{description}, which is not an array or number{remedy}")


def check_arrays(tree: Tree, what: str, remedy: str = "") -> None:
    for path, leaf in leaves_with_paths(tree):
        if not is_array_or_number(leaf):
            raise not_an_array(leaf, path, what, remedy)


def keep_arrays(argument: str) -> str:
    return f"; keep only arrays in {argument}, by equinox.partition or flax.nnx.split"


def is_key(x: object) -> bool:
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return False
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_function(x: object) -> bool:
    """Whether x is a function, and not a model that is a tree of arrays."""
    return callable(x) and (isinstance(x, jax.tree_util.Partial) or jax.tree_util.all_leaves([x]))


def is_traced(x: object) -> bool:
    return isinstance(x, Tracer)


def has_tracers(tree: Tree) -> bool:
    return any(map(is_traced, jax.tree.leaves(tree)))


def find_donated(tree: Tree) -> str | None:
    # Without paths, which are slower: a step on a mesh calls this every time.
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if hasattr(leaf, "is_deleted") and not isinstance(leaf, Tracer) and leaf.is_deleted():
            return leaf_paths(tree)[i]
    return None


def is_donated(tree: Tree) -> bool:
    return find_donated(tree) is not None


def is_ready(array: Any) -> bool:
    """Whether an array is computed, or deleted: reading it raises JAX's error immediately."""
    # In this order: JAX crashes on `is_ready` of a deleted array.
    ready: bool = array.is_deleted() or array.is_ready()
    return ready


def poll_ready(array: Any) -> bool | None:
    """Whether an array is computed, for threads beside the one that may delete or donate it.

    None if it is deleted, or split over devices.
    """
    if not array.is_fully_replicated:
        return None
    try:
        # Not `is_deleted` and then `is_ready`: the array may be deleted between the two, and then
        # JAX crashes. This either raises, or returns another array of the same memory, which nobody
        # else deletes: if the memory is freed, its `is_ready` raises.
        ready: bool = array.addressable_data(0).is_ready()
    except RuntimeError:
        return None
    return ready


def copy_numpy(tree: Tree, argument: str) -> Any:
    """Return a tree with copies of NumPy arrays, whose memory JAX would share on a CPU."""
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree

    def copied(keys: Any, leaf: object) -> Any:
        leaf = native(leaf, path_str(keys), argument)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return jax.tree_util.tree_map_with_path(copied, tree)


def all_native(tree: Tree, argument: str) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: native(leaf, path_str(keys), argument), tree
    )


def native(leaf: object, path: str, argument: str) -> Any:
    """Return a leaf, a NumPy array in the byte order of the machine: JAX accepts no other."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not is_array(leaf):
        raise not_an_array(leaf, path, argument)
    return leaf if leaf.dtype.isnative else leaf.astype(leaf.dtype.newbyteorder("="))


def has_same_bits(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (is_array(a) and is_array(b)):
        return bool(a == b)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    values_a = concrete(key_data(a))
    values_b = concrete(key_data(b))
    if values_a is None or values_b is None:
        return False
    # As bytes: NaN differs from itself, and 0.0 is equal to -0.0.
    return values_a.tobytes() == values_b.tobytes()


def concrete(x: object) -> np.ndarray[Any, Any] | None:
    """Return the value of x; None if it is traced or on other hosts."""
    if is_traced(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def compute_dtype(dtype: DTypeLike) -> Any:
    return dtype if np.dtype(dtype).itemsize > 4 else np.dtype(np.float32)


def widen(x: Any) -> Any:
    return x.astype(compute_dtype(x.dtype))


def replace_leaves(
    leaves: Sequence[Any], indices: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    changed = list(leaves)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def partition_arrays(
    tree: Tree, which: Callable[[Any], bool] = lambda leaf: isinstance(leaf, jax.Array)
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays of a tree (or what `which` selects), and a function that replaces them."""
    leaves, treedef = flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if which(leaf)]

    def fill(arrays: Sequence[Any]) -> Any:
        return treedef.unflatten(replace_leaves(leaves, indices, arrays))

    return [leaves[i] for i in indices], fill


def merge_dicts(
    parts: Iterable[tuple[str, Mapping[str, Any]]], refusal: Callable[[str, str, str], str]
) -> dict[str, Any]:
    """Join dicts; `refusal(name, part, other part)` is the error of a name that two parts have."""
    result: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for part, values in parts:
        for name, value in values.items():
            if name in result:
                raise ValueError(refusal(name, owner[name], part))
            result[name] = value
            owner[name] = part
    return result


def default_float() -> Any:
    return jax.dtypes.canonicalize_dtype(np.float64)


def default_int() -> Any:
    return jax.dtypes.canonicalize_dtype(np.int64)


def suggest_names(name: str, names: Iterable[str]) -> str:
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close and len(names) <= 6:
        close = names
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


def shape_of(leaf: Any, sharding: Any = None, *, weak: bool = False) -> jax.ShapeDtypeStruct:
    weak_type = weak and getattr(leaf, "weak_type", False)
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding, weak_type=weak_type)


def is_like(params: Tree, tree: Tree) -> bool:
    """Whether a tree has an array, or None, for each leaf of params."""
    try:
        subtrees = structure(params).flatten_up_to(tree)
        return all(map(_is_leaf, [subtree for subtree in subtrees if subtree is not None]))
    except (ValueError, TypeError):
        return False


def _is_leaf(x: object) -> bool:
    return is_array(x) or jax.tree_util.all_leaves([x])


def flatten_like(
    params: Tree, tree: Tree, what: str, *, is_leaf: Any = None, may_leave_out: bool = True
) -> list[Any]:
    """Return the subtrees of `tree` at the leaves of `params`: arrays, `is_leaf` nodes or None."""
    treedef = structure(params)
    omission = ", with None for a leaf to leave out" if may_leave_out else ""
    remedy = f"Give {what} the structure of params{omission}."
    try:
        subtrees = treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{_mismatch(params, tree, what, is_leaf)}. {remedy}") from error
    for i, sub in enumerate(subtrees):
        if sub is None:  # no call: nearly all leaves of a slot of one label of many are None
            continue
        if not (_is_leaf(sub) or (is_leaf and is_leaf(sub))):
            raise ValueError(
                f"{what}: at {quote_path(leaf_paths(params)[i])}: must be an array, as in params, "
                f"got a {type(sub).__name__} with {len(jax.tree.leaves(sub))} leaves. {remedy}"
            )
    return subtrees


def _mismatch(params: Tree, tree: Tree, what: str, is_leaf: Any) -> str:
    def is_node(x: object) -> bool:
        return x is None or bool(is_leaf and is_leaf(x))

    wanted = leaf_paths(params, is_node)
    paths = leaf_paths(tree, is_node)
    problems: list[str] = []
    if paths == [""]:  # a single leaf
        problems.append(f"got {describe_type(tree)}")
    missing = only_in(wanted, paths)
    if missing:
        problems.append(f"missing: {', '.join(map(repr, missing[:20]))}")
    extra = only_in(paths, [*wanted, ""])
    if extra:
        problems.append(f"extra: {', '.join(map(repr, extra[:20]))}")
    if not problems:
        problems.append(
            f"same paths, other containers: {structure(tree)} instead of {structure(params)}"
        )
    return f"{what} does not have the structure of params; {'; '.join(problems)}"


# Rows: stacking trees on a new leading axis, sizes of leading axes, and unstacking.


def stack_trees(
    trees: Sequence[Any], what: str, name: Callable[[int], str] = "element {}".format
) -> Any:
    """Stack trees by leaf on a new leading axis: JAX arrays on their device, others by NumPy."""
    flat = list(map(flatten, trees))
    treedef = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != treedef:
            raise ValueError(
                f"{what}: {name(i)} must have the structure {treedef} of {name(0)}, got {other}"
            )

    def stacked(leaves: Sequence[Any], path: str) -> Any:
        is_on_device = all(isinstance(leaf, jax.Array) for leaf in leaves)
        if is_on_device:
            _check_same(leaves, path, what, name)
            return jnp.stack(leaves)  # without blocking on the device
        arrays = [np.asarray(native(leaf, path, what)) for leaf in leaves]
        _check_same(arrays, path, what, name)
        return np.stack(arrays)

    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return treedef.unflatten(map(stacked, columns, leaf_paths(trees[0])))


def unstack_trees(tree: Tree, what: str) -> list[Any]:
    named = leaves_with_paths(tree)
    sizes = {np.shape(leaf)[:1] for _, leaf in named}
    if len(sizes) != 1 or () in sizes:
        got = format_value(jax.tree.map(np.shape, tree))
        raise ValueError(
            f"{what}: must have arrays whose first axis is the number of elements, got shapes {got}"
        )
    columns = []
    for path, leaf in named:
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(native(leaf, path, what))
        columns.append(_copied_rows(array))
    return [structure(tree).unflatten(row) for row in zip(*columns, strict=True)]


def no_rows(tree: Tree) -> Any:
    def empty(leaf: Any) -> Any:
        shape = (0, *np.shape(leaf))
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        return np.empty(shape, getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)

    return jax.tree.map(empty, tree)


def leading_sizes(tree: Tree) -> dict[int, str]:
    sizes: dict[int, str] = {}
    for path, leaf in leaves_with_paths(tree):
        for size in np.shape(leaf)[:1]:
            sizes.setdefault(size, f"{size} at {quote_path(path)}")
    return sizes


def _copied_rows(array: Any) -> list[Any]:
    if isinstance(array, jax.Array) or array.ndim == 1:
        return list(array)
    # Rows of NumPy are views, each of which would keep the whole array alive.
    return [row.copy() for row in array]


def _check_same(arrays: Sequence[Any], path: str, what: str, name: Callable[[int], str]) -> None:
    # Strings may have different lengths; the dtypes of PRNG keys have no kind.
    def type_of(array: Any) -> tuple[Any, Any]:
        is_string = getattr(array.dtype, "kind", "V") in "SU"
        return array.shape, array.dtype.kind if is_string else array.dtype

    first = type_of(arrays[0])
    for i, array in enumerate(arrays):
        if type_of(array) != first:
            pair = (
                f"{describe_type(arrays[0])} in {name(0)} and {describe_type(array)} in {name(i)}"
            )
            raise ValueError(
                f"{what}: {leaf_at(path)} must be alike to be stacked, got {pair}; pad, crop or "
                "cast before"
            )
