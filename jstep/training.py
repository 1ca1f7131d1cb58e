"""The training step: the only place that compiles, donates and counts."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep import _tree
from jstep._microbatches import AggregationMethod
from jstep._typing import Array, Optimizer, Params, Slots, Updates, require_optimizer
from jstep._var_list import VarList
from jstep.clipping import global_norm
from jstep.gradients import GATE_OP, gradient_function
from jstep.optimizers._leafwise import apply_updates, matched_gradients
from jstep.state import MODEL_STATE, START_STEP, TrainState

NORMS = ("grad_norm", "update_norm", "param_norm")


def apply_gradients(
    state: TrainState, grads: Updates, optimizer: Optimizer, *, increment_global_step: bool = True
) -> TrainState:
    """The next state: params + updates, new slots, global_step + 1. Pure; it neither compiles nor donates.

    Args:
        state: The state before the update.
        grads: A tree like `state.params`; a leaf is an array, an `IndexedSlices`, or None to stay as it is.
        optimizer: The one the state was created with.
        increment_global_step: Whether the update counts.

    Raises:
        TypeError: A gradient is not floating point.
        ValueError: All gradients are None, structures or shapes do not fit (names the path), or the slots of
            the state are not the optimizer's.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], state.global_step)
        0.5 1

    Source: `tf.train.Optimizer.apply_gradients`.
    """
    return _applied(state, grads, optimizer, increment_global_step)[0]


def _applied(state: TrainState, grads: Updates, optimizer: Optimizer, increment: bool) -> tuple[TrainState, Updates]:
    require_optimizer("optimizer", optimizer)
    if not isinstance(state, TrainState):
        raise TypeError(f"state: must be a TrainState, got {type(state).__name__}; see TrainState.create")
    if state.global_step is None:
        raise ValueError("the state has no global step: state.replace(global_step=jstep.create_global_step())")
    matched_gradients(grads, state.params)  # also where no element of a chain looks at them
    held = {name: tree for name, tree in state.slots.items() if name != MODEL_STATE}
    updates, own = optimizer.update(grads, held, state.params, state.global_step)
    _check_slots(held, own)
    if not increment:
        # A skipped update moves start_step along with the step; where the step stays, so does the age.
        own = {name: held[name] if name.rsplit("/", 1)[-1] == START_STEP else tree for name, tree in own.items()}
    params = apply_updates(state.params, updates)
    new = state.replace(params=params, slots={**state.slots, **own})
    return (new.replace(global_step=state.global_step + 1) if increment else new), updates


def _check_slots(held: Slots, own: Slots) -> None:
    if held.keys() != own.keys():
        raise ValueError(
            f"the optimizer's slots are not those of the state: missing in the state "
            f"{sorted(own.keys() - held.keys())}, unknown to the optimizer {sorted(held.keys() - own.keys())}. "
            "Use the optimizer the state was created with, "
            "or make new slots with TrainState.create(params, optimizer, global_step=state.global_step)."
        )
    for name in held:
        before, after = (_tree.flatten(tree) for tree in (held[name], own[name]))
        kinds = [[(leaf.shape, leaf.dtype) for leaf in map(jnp.asarray, leaves)] for leaves, _ in (before, after)]
        if before[1] != after[1] or kinds[0] != kinds[1]:
            raise ValueError(
                f"slot {name!r}: the optimizer returned a tree of another structure, shape or dtype than the state "
                "holds; slots keep theirs from step to step"
            )


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

    def __init__(self, step: Step, *, donate: bool, placed: Callable[[Any], Step] | None = None) -> None:
        self.__wrapped__ = step
        self.__name__ = getattr(step, "__name__", "train_step")
        self.__doc__ = step.__doc__ or type(self).__doc__
        self.donate = donate
        self.placed = placed or (lambda shardings: step)
        self._constants: dict[str, Array] = {}
        self._on_one_device = self._jit(step)
        self._on_meshes: dict[Any, Any] = {}
        self._current: Any = self._on_one_device
        self._last: Callable[[], Any] = lambda: None

    def _jit(self, step: Step, **out_shardings: Any) -> Any:
        def compiled(state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
            new_state, metrics = step(state, *args)
            computed, constants = _split_constants(metrics)
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
        key = tuple((_tree.structure(tree), tuple(jax.tree.leaves(tree))) for tree in (shardings, rows))
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
        return frozenset(self._constants)

    def _cache_size(self) -> int:
        return sum(int(jitted._cache_size()) for jitted in (self._on_one_device, *self._on_meshes.values()))

    def __repr__(self) -> str:
        return f"<jstep.TrainStep {self.__name__}, donate={self.donate}>"


def _mesh_shardings(state: Any) -> Any:
    """A sharding for each leaf of a state that lies on a mesh; None where it lies on one device, or is traced."""
    leaves, treedef = _tree.flatten(state)
    placed = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array) and not _tree.is_traced(leaf)]
    mesh = next((s.mesh for s in placed if isinstance(s, NamedSharding) and s.num_devices > 1), None)
    if mesh is None:
        return None
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = [getattr(leaf, "sharding", everywhere) for leaf in leaves]
    return treedef.unflatten([s if isinstance(s, NamedSharding) else everywhere for s in shardings])


def _explain_donation(state: Any, error: Exception | None) -> None:
    for path, leaf in _tree.leaves_with_paths(state):
        if isinstance(leaf, jax.Array) and not _tree.is_traced(leaf) and leaf.is_deleted():
            raise RuntimeError(
                f"the state's {path!r} was donated to an earlier step, whose result holds its memory now. Go on with "
                "the state a step returns, `state, metrics = train_step(state, ...)`, or keep old states alive with "
                "minimize(..., donate=False)."
            ) from error


def _split_constants(metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    constants = {name: value for name, value in metrics.items() if isinstance(value, np.ndarray | np.generic)}
    return {name: value for name, value in metrics.items() if name not in constants}, constants


def minimize(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    has_model_state: bool = False,
    rng: Array | None = None,
    metrics: Sequence[str] = (),
    increment_global_step: bool = True,
    jit: bool = True,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """The training step of a loss: `train_step(state, *args) -> (state, metrics)`, compiled, the state donated.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar. With has_aux `-> (loss, aux)`; with
            has_model_state `loss_fn(params, model_state, *args) -> (loss, model_state)`; with both
            `-> (loss, (model_state, aux))`; with rng it also takes `rng=key`.
        optimizer: The one the state was created with.
        var_list: What to train, as in `compute_gradients`; the rest stays as it is.
        has_aux: Whether loss_fn returns auxiliary values, which join the metrics.
        num_microbatches: In how many parts the batch is gone through, as in `compute_gradients`: one update.
        weight_fn: The weight of a microbatch, as in `compute_gradients`.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH.
        aggregation_method: How the gradients of microbatches are added up.
        has_model_state: Whether loss_fn takes and returns non-trained variables, `state.slots["model_state"]`.
        rng: A PRNG key; loss_fn gets `fold_in(rng, global_step)`, a function of the step alone, so that a run
            that was interrupted draws the same numbers. A microbatch i gets `fold_in(that, i)`.
        metrics: Which of `"grad_norm"` (of the raw gradients), `"update_norm"` (of the updates as added) and
            `"param_norm"` (of the new parameters) to compute.
        increment_global_step: Whether the update counts.
        jit: Whether to compile. False gives the pure function.
        donate: Whether the compiled step takes over the memory of the state passed in.

    Returns:
        A `TrainStep`, or the pure function where jit=False. Its metrics hold `loss`, each hyperparameter in force at
        the update, the norms asked for, and the entries of aux where it is a mapping, else `aux`; scalars
        on the device, which nothing waits for.

    Raises:
        TypeError: An argument, the loss or a gradient is of the wrong type.
        ValueError: An argument is out of range, or something does not fit: var_list, the batch and
            num_microbatches, the state and the optimizer, names of metrics that collide.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 10, 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] * x) ** 2, optimizer)
        >>> state, metrics = train_step(state, jnp.float32(2.0))
        >>> print(state.params["w"], state.global_step, metrics["loss"], metrics["learning_rate"])
        0.19999999 1 4.0 0.1

    Source: `tf.train.Optimizer.minimize`.
    """
    require_optimizer("optimizer", optimizer)
    norms = _checked_norms(metrics)
    if rng is not None and not _tree.is_array(rng):
        raise TypeError(f"rng={rng!r}: must be a key, such as jax.random.key(0), got {type(rng).__name__}")
    compute = gradient_function(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        has_model_state=has_model_state,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
    )

    def placed(rows: Any) -> Step:
        """The step for batches whose leaves have these shardings."""

        def train_step(state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Any]]:
            if not isinstance(state, TrainState):
                raise TypeError(
                    f"state: must be a TrainState, got {type(state).__name__}; make one with TrainState.create"
                )
            if has_model_state and MODEL_STATE not in state.slots:
                raise ValueError("has_model_state=True, but the state has none: TrainState.create(..., model_state=…)")
            if state.global_step is None:
                raise ValueError("the state has no global step: state.replace(global_step=jstep.create_global_step())")
            key = None if rng is None else jax.random.fold_in(rng, state.global_step)
            loss, model_state, aux, grads = compute(state.params, state.slots.get(MODEL_STATE), args, {}, key, rows)
            new_state, updates = _applied(state, grads, optimizer, increment_global_step)
            if has_model_state:
                new_state = new_state.replace(slots={**new_state.slots, MODEL_STATE: model_state})
            sources = {"grad_norm": grads, "update_norm": updates, "param_norm": _trainable(new_state.params)}
            parts = {
                "the loss": {"loss": loss},
                "the optimizer's hyperparameters": optimizer.hyperparameters(state.global_step),
                "aux": (dict(aux) if isinstance(aux, Mapping) else {"aux": aux}) if has_aux else {},
                "the norms": {name: global_norm(sources[name]) for name in norms},
            }
            return new_state, _joined(parts)

        return train_step

    return TrainStep(placed(None), donate=donate, placed=placed) if jit else placed(None)


def _checked_norms(metrics: Any) -> tuple[str, ...]:
    if not isinstance(metrics, str | list | tuple | set | frozenset):
        raise TypeError(f"metrics={metrics!r}: must be names among {NORMS}, got {type(metrics).__name__}")
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in names:
        if name not in NORMS:
            raise ValueError(f"metrics: {name!r} is unknown{_tree.nearest(str(name), NORMS)}; it takes any of {NORMS}")
    return names


def _trainable(params: Params) -> Any:
    return jax.tree.map(lambda leaf: leaf if _tree.is_trainable(leaf) else None, params)


def _joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for part, values in parts.items():
        for name, value in values.items():
            if name in joined:
                raise ValueError(f"metrics: {part} and {origin[name]} both have {name!r}; rename it in {part}")
            joined[name], origin[name] = value, part
    return joined


def scan_steps(train_step: Callable[..., Any], length: int | None = None) -> Callable[..., Any]:
    """K steps in one call: `f(state, *stacked) -> (state, stacked metrics)`.

    Args:
        train_step: What `minimize` returned, or any function `(state, *args) -> (state, metrics)`.
        length: K, where train_step takes no args to tell it.

    Returns:
        A function whose args are stacked on a leading axis of size K, and whose metrics come back so. Of a compiled
        step it is a compiled one that donates likewise; of a plain function, a plain one.

    Raises:
        TypeError: `train_step` is no function.
        ValueError: The leading axes of the args differ, or there is none.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state, metrics = jstep.scan_steps(train_step)(state, jnp.ones(3))
        >>> print(state.global_step, metrics["loss"])
        3 [1.     0.25   0.0625]
    """
    if not callable(train_step):
        raise TypeError(f"train_step={train_step!r}: must be a function (state, *args) -> (state, metrics)")

    def scanned(step: Callable[..., Any]) -> Callable[..., Any]:
        def scanned_steps(state: TrainState, *stacked: Any) -> tuple[TrainState, Any]:
            k = _leading_size(stacked, length)
            constants: dict[str, Any] = {}

            def body(state: TrainState, args: Any) -> tuple[TrainState, Any]:
                state, metrics = step(state, *args)
                if isinstance(metrics, dict):
                    metrics, fixed = _split_constants(metrics)
                    constants.update(fixed)
                return state, metrics

            state, metrics = jax.lax.scan(body, state, stacked, length=k)
            if constants:
                metrics = metrics | {name: np.full((k, *np.shape(v)), v, v.dtype) for name, v in constants.items()}
            return state, metrics

        return scanned_steps

    if not isinstance(train_step, TrainStep):
        return scanned(train_step)
    return TrainStep(
        scanned(train_step.__wrapped__),
        donate=train_step.donate,
        placed=lambda stacked: scanned(train_step.placed(jax.tree.map(_without_step_axis, stacked))),
    )


def _without_step_axis(sharding: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def last_of(stacked: Any) -> Any:
    """The values of the last of K steps, in one dispatch on this process alone: others may not ask for them."""

    def here(leaf: Any) -> Any:
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and leaf.is_fully_replicated
        return leaf.addressable_data(0) if is_global else leaf

    return _last_of(jax.tree.map(here, stacked))


@jax.jit
def _last_of(stacked: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[-1], stacked)


def _leading_size(stacked: Any, length: int | None) -> int:
    sizes = {}
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise TypeError(f"length={length!r}: must be an integer, got {type(length).__name__}")
    if length is not None and length < 1:
        raise ValueError(f"length={length}: must be ≥ 1")
    for path, leaf in _tree.leaves_with_paths(stacked):
        if np.ndim(leaf) == 0:
            raise ValueError(f"scan_steps: argument {path} is a scalar; stack the values of K steps on a leading axis")
        sizes[path] = np.shape(leaf)[0]
    if length is not None:
        sizes["length"] = length
    if not sizes:
        raise ValueError("scan_steps: the step takes no args, so say how many: scan_steps(train_step, length=K)")
    (first, k), *rest = sizes.items()
    for path, size in rest:
        if size != k:
            raise ValueError(
                f"scan_steps: the leading axes differ: argument {first} has {k}, argument {path} has {size}"
            )
    return k
