"""Muon, and the distribution of matrices over devices."""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.checks import as_bool, as_choice, as_int, as_number, format_value
from jstep.core.device_values import floating_dtype, when_concrete
from jstep.core.meshes import mesh_axes_of
from jstep.core.placement import layout_of
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.optimizers import rules
from jstep.optimizers.chains import chain, element
from jstep.optimizers.hyperparameters import Hyper, as_hyperparameter
from jstep.optimizers.leaf_values import Axes, MatrixAxes, leaf_flag, matrix_axes, own_leaves
from jstep.optimizers.rules import (
    SLOW,
    Decay,
    Result,
    Slot,
    Values,
    average,
    from_direction,
    from_update,
    positive,
)
from jstep.slots.indexed_slices import IndexedSlices
from jstep.slots.matching import match_gradients

# Distributing matrices of one shape over the devices of a mesh, so that no device repeats another's
# work.

Names = tuple[str, ...]


class MatrixLayout(NamedTuple):
    """The mesh axes of a stack of matrices: of its batch (major first), rows and columns."""

    mesh: Any
    batch: Names
    rows: Names
    columns: Names


def layout_of_matrix(
    sharding: NamedSharding | None, shape: tuple[int, ...], axes: MatrixAxes
) -> MatrixLayout | None:
    """The layout of an array as a stack of matrices; None if it is unknown, or has none."""
    if sharding is None or sharding.mesh.size == 1 or len(sharding.spec) > len(shape):
        return None
    spec = [mesh_axes_of(axis) for axis in sharding.spec] + [()] * (len(shape) - len(sharding.spec))
    rows, columns = axes
    batch = tuple(i for i in range(len(shape)) if i not in (*rows, *columns))
    names: list[Names] = []
    for group in (batch, rows, columns):
        # Of several axes that are merged into one, only the first may be split.
        if any(spec[i] for i in group[1:]):
            return None
        names.append(spec[group[0]] if group else ())
    return MatrixLayout(sharding.mesh, *names)


def distribute_matrices(
    members: Sequence[Array], layout: MatrixLayout, fn: Callable[[Array], Array]
) -> list[Array]:
    """Apply `fn` to stacked matrices of one shape, each on one device, if possible."""
    shape = members[0].shape[-2:]
    # Each shard of a split batch is extended by itself: concatenated in global order, the shards
    # would have to move.
    parts = math.prod(layout.mesh.shape[name] for name in layout.batch)
    flat = [member.reshape((parts, -1, *shape)) for member in members]
    stack = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)
    hops = _hops(layout, parts * stack.shape[1])
    devices = math.prod(layout.mesh.shape[name] for name in hops[-1][0])
    padding = -stack.shape[1] % (devices // parts)
    if padding:
        stack = jnp.pad(stack, ((0, 0), (0, padding), (0, 0), (0, 0)))  # zero matrices stay zero
    stack = stack.reshape((-1, *shape))
    # In a single exchange XLA would gather the stack on every device.
    for hop in hops:
        stack = _constrained(stack, layout.mesh, hop)
    stack = fn(stack)
    for hop in reversed(hops):
        stack = _constrained(stack, layout.mesh, hop)
    stack = stack.reshape((parts, -1, *shape))
    results: list[Array] = []
    first = 0
    for member, flat_member in zip(members, flat, strict=True):
        end = first + flat_member.shape[1]
        results.append(stack[:, first:end].reshape(member.shape))
        first = end
    return results


def _hops(layout: MatrixLayout, count: int) -> list[tuple[Names, Names, Names]]:
    """The successive layouts of a stack, from its own to one that splits only between matrices."""
    _, batch, rows, columns = layout
    hops = [(batch, rows, columns)]
    chosen = _free_axes(layout, count)
    # Axes over which the stack is replicated are split first: this needs no communication, and
    # later hops move less.
    if chosen:
        batch = (*batch, *chosen)
        hops.append((batch, rows, columns))
    # Minor axes first: the shards along a major axis are not contiguous.
    while columns:
        batch = (*batch, columns[-1])
        columns = columns[:-1]
        hops.append((batch, rows, columns))
    while rows:
        batch = (*batch, rows[-1])
        rows = rows[:-1]
        hops.append((batch, rows, columns))
    return hops


def _free_axes(layout: MatrixLayout, count: int) -> Names:
    """Return the unused mesh axes with which a device has the fewest matrices.

    Of several such sets, this is the smallest.
    """
    sizes = layout.mesh.shape
    used = {*layout.batch, *layout.rows, *layout.columns}
    used_devices = math.prod(sizes[name] for name in used)
    subsets: list[Names] = [()]
    for name in layout.mesh.axis_names:
        if name not in used and sizes[name] > 1:
            subsets += [(*subset, name) for subset in subsets]

    def matrices_of_device(names: Names) -> int:
        return -(-count // (used_devices * math.prod(sizes[name] for name in names)))

    return min(subsets, key=lambda names: (matrices_of_device(names), len(names)))


def _constrained(stack: Array, mesh: object, hop: tuple[Names, Names, Names]) -> Array:
    spec = PartitionSpec(*(names or None for names in hop))
    if not jax.sharding.get_abstract_mesh().empty:
        return jax.lax.with_sharding_constraint(stack, spec)
    if not isinstance(mesh, Mesh):
        return stack
    return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec))


# Newton–Schulz iteration: approximate the nearest orthogonal matrix with matrix products only.

Triple: TypeAlias = tuple[float, float, float]


class Preset(NamedTuple):
    """Coefficients (a, b, c) by step, the default number of steps, a factor on the norm."""

    triples: tuple[Triple, ...]
    steps: int = 5
    safety: float = 1.0
    repeats: bool = False


def _read_presets() -> dict[str, Preset]:
    file = importlib.resources.files("jstep.optimizers").joinpath("newton_schulz.toml")
    text = file.read_text("utf-8")
    presets: dict[str, Preset] = {}
    for name, row in tomllib.loads(text).items():
        triples: Any = tuple(map(tuple, row.pop("triples")))
        presets[name] = Preset(triples, **row)
    return presets


PRESETS = _read_presets()
COEFFICIENTS: Triple = PRESETS["jordan"].triples[0]


def triples_and_safety(coefficients: object, steps: int | None) -> tuple[tuple[Triple, ...], float]:
    count = None if steps is None else as_int(steps, "ns_steps", at_least=1)
    if not isinstance(coefficients, str):
        return _custom_triples(coefficients, count or 5), 1.0
    preset = PRESETS[as_choice(coefficients, "ns_coefficients", PRESETS)]
    triples = preset.triples
    count = preset.steps if count is None else count
    if count <= len(triples):
        return triples[:count], preset.safety
    if not preset.repeats:
        raise ValueError(
            f"ns_steps={count}: must be at most {len(triples)} for {coefficients!r}; "
            "'polar_express' allows any"
        )
    # The last triple is repeated.
    return triples + triples[-1:] * (count - len(triples)), preset.safety


def _custom_triples(value: Any, count: int) -> tuple[Triple, ...]:
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(0)
    if numbers.shape not in ((3,), (count, 3)) or not np.isfinite(numbers).all():
        raise ValueError(
            f"ns_coefficients={format_value(value)}: must be a triple, {count} triples "
            f"or one of {list(PRESETS)}"
        )
    return tuple((a, b, c) for a, b, c in np.broadcast_to(numbers, (count, 3)).tolist())


SMALL = 64 * 64
"""Up to this number of elements, batching matrices is faster on CPUs, too."""

Normalization: TypeAlias = Literal["frobenius", "schatten"]


class Iteration(NamedTuple):
    """The options of the iteration.

    Attributes:
        dtype: The dtype of the products; None for the dtype of the matrices.
        safety: A factor on the norm.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    dtype: Any
    safety: float = 1.0
    schatten: bool = False


def orthogonalize_matrices(
    matrices: Sequence[Array],
    iteration: Iteration,
    epsilon: object,
    layouts: Sequence[MatrixLayout | None],
) -> list[Array]:
    """Orthogonalize matrices [..., rows, columns] approximately; a zero matrix stays zero."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, (matrix, layout) in enumerate(zip(matrices, layouts, strict=True)):
        shape = matrix.shape if layout is None else matrix.shape[-2:]
        groups.setdefault((shape, matrix.dtype, layout), []).append(i)
    results: dict[int, Array] = {}
    for (shape, _, layout), indices in groups.items():
        members = [matrices[i] for i in indices]

        def batched(epsilon: object, *members: Array) -> list[Array]:
            return list(newton_schulz(jnp.stack(members), epsilon, iteration))

        def one_by_one(epsilon: object, *members: Array) -> list[Array]:
            return [newton_schulz(member, epsilon, iteration) for member in members]

        if layout is not None and sum(math.prod(member.shape[:-2]) for member in members) > 1:
            orthogonal = distribute_matrices(
                members, layout, lambda stack: newton_schulz(stack, epsilon, iteration)
            )
        elif len(members) == 1:
            orthogonal = one_by_one(epsilon, *members)
        elif math.prod(shape) <= SMALL:
            orthogonal = batched(epsilon, *members)
        else:
            orthogonal = jax.lax.platform_dependent(
                epsilon, *members, cpu=one_by_one, default=batched
            )
        results |= dict(zip(indices, orthogonal, strict=True))
    return [results[i] for i in range(len(matrices))]


def _newton_schulz(x: Array, epsilon: object, iteration: Iteration) -> Array:
    wide = x.dtype
    # The products have as many rows and columns as x has rows, so we want the shorter side there.
    is_tall = x.shape[-2] > x.shape[-1]
    x = _transposed(x) if is_tall else x
    smallest = jnp.asarray(epsilon).astype(wide)
    norm = _frobenius_norm(x)
    # The Schatten norm comes from the first product, computed at norm 1: squares of small matrices
    # would underflow.
    divisor = jnp.maximum(norm if iteration.schatten else iteration.safety * norm, smallest)
    x = (x / divisor).astype(iteration.dtype or wide)
    gram = None
    if iteration.schatten:
        square = (x @ _transposed(x)).astype(wide)
        # With an infinite norm x is zero, and stays zero as with the Frobenius norm.
        smallest = jnp.where(jnp.isinf(divisor), 1, smallest / divisor)
        divisor = jnp.maximum(iteration.safety * jnp.sqrt(_frobenius_norm(square)), smallest)
        narrow = x.dtype
        x = (x.astype(wide) / divisor).astype(narrow)
        gram = (square / jnp.square(divisor)).astype(narrow)
    for a, b, c in iteration.coefficients:
        gram = x @ _transposed(x) if gram is None else gram
        x = a * x + (b * gram + c * (gram @ gram)) @ x
        gram = None
    x = _transposed(x) if is_tall else x
    return x.astype(wide)


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -2, -1)


def _frobenius_norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))


# Traced and lowered once for all matrices of one shape; XLA inlines it.
newton_schulz = jax.jit(_newton_schulz, static_argnums=2)


def as_matrix(x: Array, axes: MatrixAxes) -> tuple[Array, Callable[[Array], Array]]:
    """Reshape an array to matrices [batch..., in, out], and return the inverse function, too."""
    rows, columns = axes
    batch = tuple(i for i in range(x.ndim) if i not in (*rows, *columns))
    order = (*batch, *rows, *columns)
    sizes = [math.prod(x.shape[i] for i in part) for part in axes]
    is_ordered = order == tuple(range(x.ndim))
    ordered = x if is_ordered else jnp.transpose(x, order)
    matrix = ordered.reshape((*(x.shape[i] for i in batch), *sizes))

    def undo(matrix: Array) -> Array:
        array = matrix.reshape(ordered.shape)
        if is_ordered:
            return array
        return jnp.transpose(array, tuple(int(i) for i in np.argsort(order)))

    return matrix, undo


# Elements of a chain for matrices: NorMuon's normalization of neurons, and steps on a sphere.

MeanAxes: TypeAlias = Literal["neuron", "short"]


@makes_optimizer()
def normalize_neurons(
    beta2: ScalarOrSchedule = 0.95,
    epsilon: ScalarOrSchedule = 1e-10,
    axes: Axes | None = None,
    over: MeanAxes = "neuron",
) -> Optimizer:
    """NorMuon's block: U = u/(√v + ε); u = U·‖u‖/(‖U‖ + ε).

    v averages the mean of u² over the inputs of each neuron. Norms are Frobenius norms. Each matrix
    keeps its norm, so the bias of v cancels.

    Args:
        beta2: The decay of the average v, in [0, 1).
        epsilon: Added to √v and ‖U‖, > 0.
        axes: `(path, leaf) -> (in, out)`, the axes that form the matrix; see `orthogonalize`.
        over: "neuron" for a mean over the in axes, one v for each output; "short" for a mean over
            the shorter of in and out (in, if they are equal).

    Returns:
        An element of a chain with the slot `neuron_v` (initially 0), which has the leaf's shape
        with size 1 on the axes of the mean. Its hyperparameters are `neuron_beta2` and
        `neuron_epsilon`.

    Raises:
        ValueError: An argument is out of range; at `init`, a leaf has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.trace(0.95, use_nesterov=True),
        ...     jstep.orthogonalize(scale="original"),
        ...     jstep.normalize_neurons(),
        ...     jstep.scale_by_learning_rate(0.02),
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.ones((4, 3))}, optimizer)
        >>> print(state.slots["neuron_v"]["w"].shape)
        (1, 3)

    Source: Li et al., "NorMuon" (2025), and the authors' code, which keeps the norm; the paper sets
    the root mean square to 0.2.
    """
    matrix = matrix_axes(axes, "to normalize its neurons")
    is_short = as_choice(over, "over", ["neuron", "short"]) == "short"

    def mean_and_matrix(path: str, leaf: Any) -> MatrixAxes:
        """The axes of the mean, and all axes of the matrix."""
        rows, columns = matrix(path, leaf)
        sizes = np.shape(leaf)
        row_size = math.prod(sizes[axis] for axis in rows)
        column_size = math.prod(sizes[axis] for axis in columns)
        mean = columns if is_short and column_size < row_size else rows
        return mean, rows + columns

    def shape(path: str, leaf: Any) -> tuple[int, ...]:
        mean, _ = mean_and_matrix(path, leaf)
        return tuple(1 if axis in mean else size for axis, size in enumerate(np.shape(leaf)))

    hyper = {"neuron_beta2": as_hyperparameter("beta2", beta2, **rules.BETA)}
    hyper |= {"neuron_epsilon": positive("epsilon", epsilon)}
    flags = {"axes": leaf_flag(mean_and_matrix)}
    return from_update(
        "normalize_neurons", neurons_update, {"neuron_v": Slot(shape=shape)}, hyper, flags=flags
    )


def neurons_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    mean, matrix = h.axes
    v = average(s.neuron_v, jnp.mean(jnp.square(u), mean, keepdims=True), h.neuron_beta2)
    new = u / (jnp.sqrt(v) + h.neuron_epsilon)
    old_norm = jnp.sqrt(jnp.sum(jnp.square(u), matrix, keepdims=True))
    norm = jnp.sqrt(jnp.sum(jnp.square(new), matrix, keepdims=True))
    return new * (old_norm / (norm + h.neuron_epsilon)), {"neuron_v": v}


Radius: TypeAlias = ScalarOrSchedule | Callable[[str, Any], float] | None
SMALLEST = 1e-10


@makes_optimizer()
def on_hyperball(
    learning_rate: ScalarOrSchedule, radius: Radius = None, axes: Axes | None = None
) -> Optimizer:
    """Hyperball: q = p − lr·R·u/‖u‖; p = R·q/‖q‖, for each matrix p with R = ‖p‖.

    u is the update of the previous element. Norms are Frobenius norms. The matrix rotates by about
    lr radians and keeps its norm. Use it for linear layers; train embeddings, biases, gains,
    routers and gates with Adam. Do not change the updates after it (`cautious`, `decay_weights`,
    `scale_updates`). In bfloat16, wrap the whole optimizer in `master_weights`.

    Args:
        learning_rate: The relative step size lr ≥ 0; 0.02 is common, or √(lr·weight_decay) of the
            AdamW run that it replaces.
        radius: The norm R: a number > 0, or `(path, leaf) -> number`, to which the first update
            scales each matrix; None for its current norm.
        axes: `(path, leaf) -> (in, out)`, the axes that form the matrix; see `orthogonalize`. Each
            matrix of a stack has its own norm.

    Returns:
        An element of a chain without slots, used in place of `scale_by_learning_rate`.

    Raises:
        ValueError: An argument is out of range; at `init`, a leaf has fewer than two axes, or a
            matrix is zero and would stay zero.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> adamh = jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(0.02))
        >>> state = jstep.TrainState.create({"w": jnp.array([[3.0], [4.0]])}, adamh)
        >>> w = jstep.apply_gradients(state, {"w": jnp.array([[1.0], [-1.0]])}, adamh).params["w"]
        >>> print(*(f"{x:.4f}" for x in (*w[:, 0], jnp.linalg.norm(w))))
        2.9205 4.0584 5.0000

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II" (2026), and its
    AdamH and MuonH in Levanter.
    """
    matrix = matrix_axes(axes, "to keep its norm")
    hyper: dict[str, Any] = {"learning_rate": learning_rate}
    flags = {"axes": leaf_flag(matrix)}
    if callable(radius) and not isinstance(radius, type):
        radius_fn: Any = radius

        def leaf_radius(path: str, leaf: Any) -> float:
            return as_number(
                radius_fn(path, leaf), f"radius at {trees.quote_path(path)}", low=0, above=True
            )

        flags["radius"] = leaf_flag(leaf_radius)
    elif radius is not None:
        hyper["radius"] = radius

    def check(params: Params) -> None:
        for path, leaf in own_leaves(params):
            if not trees.is_trainable(leaf) or not trees.is_array(leaf) or not np.size(leaf):
                continue
            rows, columns = matrix(path, leaf)
            if trees.is_traced(leaf):  # its value is unknown during tracing
                when_concrete(path, _refuse_zero, rows + columns)
            else:
                _refuse_zero(path, leaf, rows + columns)

    return rules.checking(from_update("hyperball", hyperball_update, {}, hyper, flags=flags), check)


def hyperball_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update p·(R/‖q‖ − 1) − u·lr·R²/(‖u‖·‖q‖), in one pass over p and u.

    Relative to ‖p‖, d is ‖q‖² − 1: R/‖q‖ − 1 would lose half the digits.
    """
    rows, columns = h.axes
    axes = (*rows, *columns)
    squares_p = jnp.square(p)
    squares_u = jnp.square(u)
    products = p * u
    square_p = jnp.sum(squares_p, axes, keepdims=True)
    square_u = jnp.sum(squares_u, axes, keepdims=True)
    inner = jnp.sum(products, axes, keepdims=True)
    norm_p = jnp.maximum(jnp.sqrt(square_p), SMALLEST)
    norm_u = jnp.maximum(jnp.sqrt(square_u), SMALLEST)
    if "radius" in h:
        ratio = h.radius / norm_p
        excess = (h.radius * h.radius - square_p) / jnp.square(norm_p)
    else:
        # The radius is the current norm.
        ratio = 1.0
        excess = 0.0
    # Less than the learning rate if ‖u‖ is below the smallest norm; NaN if it is infinite.
    step = h.learning_rate * ratio
    step_norm = step * (jnp.sqrt(square_u) / norm_u)
    d = jnp.square(step_norm) - 2 * step * (inner / norm_p / norm_u)
    square = 1 + d
    # If the step cancels p, no direction is left: p stays unchanged. Not `square >= 1e-6`, which
    # hides a NaN.
    exists = ~(square < 1e-6)
    norm = jnp.sqrt(jnp.where(exists, square, jnp.ones_like(square)))
    weight_p = (excess - d) / (norm * (ratio + norm))
    weight_u = ratio * step * norm_p / (norm * norm_u)
    return jnp.where(exists, weight_p * p - weight_u * u, jnp.zeros_like(p)), {}


def _refuse_zero(path: str, leaf: Any, axes: tuple[int, ...]) -> None:
    is_elsewhere = isinstance(leaf, jax.Array) and (
        trees.is_traced(leaf) or not leaf.is_fully_addressable
    )
    if not trees.is_array(leaf) or is_elsewhere:
        return
    library: Any = jnp if isinstance(leaf, jax.Array) else np  # NumPy arrays stay in host memory
    with jax.ensure_compile_time_eval():
        wide = leaf.astype(trees.compute_dtype(leaf.dtype))
        norms = jax.device_get(library.sqrt(library.sum(library.square(wide), axes)))
    if np.any(norms == 0):
        index = np.argwhere(norms == 0)[0].tolist()
        raise ValueError(
            f"params: the norm of {trees.quote_path(path)}{index or ''} must not be 0 "
            "for on_hyperball; initialize it"
        )


# Muon: orthogonalized momentum, and its orthogonalization as an element of a chain.

Scale = Literal["rms", "original"]


def _rms_scale(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


def _original_scale(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, columns / rows))


def _no_scale(rows: int, columns: int) -> float:
    return 1.0


SCALES: dict[str | None, Callable[[int, int], float]] = {
    "rms": _rms_scale,
    "original": _original_scale,
    None: _no_scale,
}


@makes_optimizer()
def muon(
    learning_rate: ScalarOrSchedule = 1e-3,
    momentum: ScalarOrSchedule = 0.95,
    *,
    use_nesterov: bool = True,
    ns_steps: int | None = None,
    ns_coefficients: Sequence[Any] | str = COEFFICIENTS,
    epsilon: ScalarOrSchedule = 1e-7,
    scale: Scale | None = "rms",
    weight_decay: ScalarOrSchedule = 0.1,
    weight_decay_mask: VarList = None,
    axes: Axes | None = None,
    ns_dtype: DTypeLike = jnp.float32,
    normalization: Normalization = "frobenius",
    distribute: bool = True,
) -> Optimizer:
    """Muon: M = μ·M + (1−μ)·g; p −= lr·(scale·(about UVᵀ) + weight_decay·p).

    UVᵀ of G = USVᵀ, where G = (1−μ)·g + μ·M by Nesterov, or M, is approximated by a Newton–Schulz
    iteration: see `orthogonalize`. Train embeddings, heads, vectors and scalars with another
    optimizer (see the example).

    Args:
        learning_rate: The step size lr ≥ 0; with scale "rms" about the same as AdamW's.
        momentum: The decay μ of the average of gradients, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.
        scale: "rms" for 0.2·√max(in, out), "original" for √max(1, out/in), None for 1.
        weight_decay: Decoupled weight decay ≥ 0.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.
        ns_steps: See `orthogonalize`.
        ns_coefficients: See `orthogonalize`.
        epsilon: See `orthogonalize`.
        axes: See `orthogonalize`.
        ns_dtype: See `orthogonalize`.
        normalization: See `orthogonalize`.
        distribute: See `orthogonalize`.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0).

    Raises:
        ValueError: An argument is out of range, the mask matches nothing, or, at `init`, a leaf has
            fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.partition(
        ...     {"muon": jstep.muon(1e-2), "adamw": jstep.adamw(1e-3)},
        ...     lambda path, leaf: "muon" if leaf.ndim == 2 and "embed" not in path else "adamw",
        ... )
        >>> dense = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}
        >>> params = {"embed": jnp.ones((8, 4)), "dense": dense}
        >>> jstep.get_slot_names(jstep.TrainState.create(params, optimizer))
        ['adamw/m', 'adamw/v', 'muon/momentum']

    Source: Jordan et al., "Muon" (2024); Liu et al., "Muon is Scalable for LLM Training" (2025),
    for scale "rms". The results match `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw" and
    products in float32.
    """
    is_ahead = as_bool(use_nesterov, "use_nesterov")

    def averaged(g: Array, p: Array, s: Values, h: Values) -> Result:
        m = average(s.momentum, g, h.momentum)
        direction = average(m, g, h.momentum) if is_ahead else m
        return direction, {"momentum": m}

    hyper = {"learning_rate": learning_rate, "weight_decay": Decay(weight_decay, weight_decay_mask)}
    return chain(
        # SLOW: orthogonalization amplifies the smallest singular values, and with them rounding
        # errors of 8-bit codes.
        from_update("muon", averaged, {"momentum": SLOW}, {"momentum": momentum}),
        orthogonalize(
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            epsilon=epsilon,
            scale=scale,
            axes=axes,
            ns_dtype=ns_dtype,
            normalization=normalization,
            distribute=distribute,
        ),
        from_direction("muon_step", lambda g, p, s, h: (g, {}), {}, hyper),
    )


@makes_optimizer()
def orthogonalize(
    *,
    ns_steps: int | None = None,
    ns_coefficients: Sequence[Any] | str = COEFFICIENTS,
    epsilon: ScalarOrSchedule = 1e-7,
    scale: Scale | None = "rms",
    axes: Axes | None = None,
    ns_dtype: DTypeLike = jnp.float32,
    normalization: Normalization = "frobenius",
    distribute: bool = True,
) -> Optimizer:
    """Orthogonalization: scale · (about UVᵀ), where the update is USVᵀ, for each matrix.

    This is a Newton–Schulz iteration: X = u/max(s·‖u‖, ε), and ns_steps times A = XXᵀ;
    X = a·X + (b·A + c·A²)·X. The default brings singular values to between 0.7 and 1.2,
    "polar_express" to within 0.0001 of 1.

    Args:
        ns_steps: The number of iterations, ≥ 1; None for the preset's number, or 5 with custom
            coefficients.
        ns_coefficients: (a, b, c), a triple for each iteration, or a preset: "jordan" (the default;
            5 equal iterations), "dion" (at most 5) or "polar_express" (8, or any number, with a
            safety factor s of 1.01, which is 1 otherwise).
        epsilon: The lower bound of the divisor, > 0: smaller gradients are damped. Optax and Keras
            divide by ‖u‖ + ε instead.
        scale: "rms" for 0.2·√max(in, out), so that updates are as large as AdamW's; "original" for
            √max(1, out/in); None for 1.
        axes: `(path, leaf) -> (in, out)`, the axes (each a number or several) that form the matrix;
            by default the last two, as in Flax. Other axes index a stack.
        ns_dtype: The dtype of the products; `jnp.bfloat16` is faster on accelerators, with errors
            of about 0.01.
        normalization: "frobenius" for the Frobenius norm ‖u‖; "schatten" for √‖uuᵀ‖, the Schatten-4
            norm, with which fewer iterations suffice.
        distribute: Whether to distribute matrices of one shape over the devices of their mesh, each
            whole on one device.

    Raises:
        ValueError: An argument is out of range; at `init`, a leaf has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.orthogonalize(scale=None), jstep.scale_by_learning_rate(1.0)
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.zeros((2, 2))}, optimizer)
        >>> grads = {"w": jnp.array([[0.0, 5.0], [5.0, 0.0]])}
        >>> print(jnp.round(jstep.apply_gradients(state, grads, optimizer).params["w"], 1) + 0.0)
        [[ 0.  -1.1]
         [-1.1  0. ]]

    Source: Jordan et al., "Muon" (2024); Bernstein and Newhouse, "Old Optimizer, New Norm" (2024);
    Amsel et al., "The Polar Express" (2025).
    """
    dtype = jax.dtypes.canonicalize_dtype(floating_dtype(ns_dtype, "ns_dtype"))
    # Leaves are computed in at least float32 anyway; wider ones keep their dtype.
    triples, safety = triples_and_safety(ns_coefficients, ns_steps)
    schatten = as_choice(normalization, "normalization", ["frobenius", "schatten"]) == "schatten"
    iteration = Iteration(triples, None if dtype == np.float32 else dtype, safety, schatten)
    hyper = {"epsilon": as_hyperparameter("epsilon", epsilon, low=0, above=True)}
    factor = SCALES[as_choice(scale, "scale", list(SCALES))]
    is_spread = as_bool(distribute, "distribute")
    axes_of = leaf_flag(matrix_axes(axes, "to be orthogonalized"))

    def orthogonal(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        gradients = match_gradients(updates, params)
        treedef = trees.structure(params)
        new: list[Any] = [None] * len(gradients)
        # Of the leaves with a gradient, in their order.
        indices: list[int] = []
        matrices: list[Array] = []
        undos: list[Callable[[Array], Array]] = []
        layouts: list[MatrixLayout | None] = []
        lists = (gradients, jax.tree.leaves(params), axes_of(params), own_leaves(params))
        for i, (gradient, leaf, axes, (path, _)) in enumerate(zip(*lists, strict=True)):
            if gradient is None:
                continue
            dense = gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
            matrix, undo = as_matrix(dense.astype(trees.compute_dtype(leaf.dtype)), axes)
            sharding = layout_of(path) if is_spread else None
            indices.append(i)
            matrices.append(matrix)
            undos.append(undo)
            layouts.append(layout_of_matrix(sharding, leaf.shape, axes))
        results = orthogonalize_matrices(matrices, iteration, h["epsilon"], layouts)
        for i, undo, result in zip(indices, undos, results, strict=True):
            new[i] = factor(*result.shape[-2:]) * undo(result)
        return treedef.unflatten(new)

    return rules.checking(element(orthogonal, hyper), axes_of)
