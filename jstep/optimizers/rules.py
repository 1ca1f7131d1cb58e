"""Optimizers from the equation of a leaf: `from_direction`, `from_update`, below them `leafwise`.

A direction is a function of the gradient, the parameter, the slots and the hyperparameters, all by
attribute. It returns u and the new slots; the parameter becomes
p − learning_rate·(u + weight_decay·p). Lion:

    def lion_direction(g, p, s, h):
        return jnp.sign(average(s.m, g, h.beta1)), {"m": average(s.m, g, h.beta2)}

    def lion(learning_rate=1e-4, beta1=0.9, beta2=0.99):
        hyper = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
        return from_direction("lion", lion_direction, {"m": MEAN}, hyper)

A `weight_decay` with a mask is a `Decay(weight_decay, weight_decay_mask)`. Bias correction needs
h.age, the age of the slots, which exists only with a `prepare`: a function that computes additional
values of h once for all leaves.

    def correction(h):
        return {"unbias": 1 / bias_correction(h.beta1, h.age)}

Everything else is done for all optimizers. An equation of another form, such as FTRL's, is a rule
for `from_update`: its result is added to the parameter or, without a learning rate, is the gradient
of the next element of a chain.

A rule is a module-level function of arrays of one floating dtype. It sees the whole leaf, but with
`sparse=True` only some rows of a table, so it must be elementwise. Plain numbers are Python floats
in h, so that 1 − 0.999 is exact.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core import new_arrays, trees
from jstep.core.checks import as_mapping, describe_type, format_value
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.tracebacks import explains_arguments
from jstep.core.trees import (
    Array,
    Held,
    Optimizer,
    Params,
    ScalarOrSchedule,
    Slots,
    Step,
    Tree,
    Updates,
)
from jstep.optimizers import hyperparameters
from jstep.optimizers.host_slots import loads_slots, update_leaves
from jstep.optimizers.hyperparameters import Hyper, as_hyperparameter, value_at
from jstep.optimizers.leaf_values import Flag, mask, own_leaves
from jstep.slots.compact_numbers import KINDS
from jstep.slots.indexed_slices import IndexedSlices, RowsInOrder, combine_rows, trim_slices
from jstep.slots.matching import as_slots, match_gradients
from jstep.slots.roles import CountedSlot, Init, Role, Roles
from jstep.state.train_state import START_STEP

# The vocabulary of rules.

DECAYED = "decayed"


@jax.tree_util.register_pytree_with_keys_class
class Values(dict[str, Any]):
    """Slots, hyperparameters and other values of a step: a dict with its entries as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{name}: must be one of {sorted(self)}", name=name, obj=self)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = sorted(self)
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> "Values":
        return cls(zip(names, values, strict=True))


LeafSlots: TypeAlias = dict[str, Any]
Result: TypeAlias = tuple[Array, dict[str, Any]]
"""A direction or an update, and the new slots; others stay unchanged."""
Prepare: TypeAlias = Callable[[Values], dict[str, Any]]
Rule: TypeAlias = Callable[[Array, Array, Values, Values], Result]
"""`rule(gradient, parameter, slots, h) -> (update, slots)`, all floating arrays of one dtype."""


@explains_arguments
@dataclasses.dataclass(frozen=True)
class Slot:
    """The initial value, shape and dtype of a slot, for `leafwise`.

    Attributes:
        initial: A number, an array, a schedule of the step of creation, or `"copy"` for a copy of
            the parameter.
        shape: `shape(path, leaf)`, the shape of the slot for a trainable leaf, or None for no slot;
            by default the parameter's shape. On a mesh the slot is sharded like the parameter,
            without the dimensions that it lacks.
        dtype: The dtype in which the slot is stored; by default the dtype of arithmetic (the
            parameter's, at least float32), in which the rule always sees floating slots.
        keeps: `"rows"` or `"columns"`: which dimension a slot with one dimension less keeps, if
            that is ambiguous, as for a square matrix.
        holds: The kind of the values, for `compact`: `"mean"` for an average of signed values with
            a decay of at most 0.99, `"slow"` for a slower one or a sum, `"square"` for a divisor
            that is never negative, `"weight"` for values like the parameter's. None stores them as
            they are.
        in_order: Whether anything besides the slot's new value, such as Lion's update, is computed
            from its old value.
        computes_params: Whether the rule computes the parameters from the slot, as FTRL does:
            `with_params` is an error.
        averages_params: Whether the slot is an average of the parameters, which `averaged_params`
            returns.

    Example:
        >>> import jstep
        >>> jstep.Slot(shape=lambda path, leaf: leaf.shape[:1] or None).initial
        0.0
    """

    initial: Any = 0.0
    _: dataclasses.KW_ONLY
    shape: Callable[[str, Any], tuple[int, ...] | None] | None = None
    dtype: Any = None
    keeps: Literal["rows", "columns"] | None = None
    holds: Literal["mean", "slow", "square", "weight"] | None = None
    in_order: bool = dataclasses.field(default=False, repr=False)
    computes_params: bool = dataclasses.field(default=False, repr=False)
    averages_params: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.keeps not in _KEPT:
            raise ValueError(f"keeps={self.keeps!r}: must be 'rows', 'columns' or None")
        if self.holds is not None and self.holds not in KINDS:
            raise ValueError(
                f"holds={self.holds!r}: must be 'mean', 'slow', 'square', 'weight' or None"
            )
        if self.averages_params and self.keeps is not None:
            raise ValueError(
                f"keeps={self.keeps!r}: must be None for an average, "
                "which has the parameter's shape"
            )


class Scalar(NamedTuple):
    """A slot with one float32 value for all parameters.

    `prepare` and `conclude` return its new values.
    """

    initial: Any = 0.0


class Decay(NamedTuple):
    weight_decay: ScalarOrSchedule
    mask: VarList


# Optimizers from an equation: `from_direction` and `from_update`.


@makes_optimizer(4)
def from_direction(
    name: str,
    direction: Rule,
    slots: Mapping[str, Any],
    hyper: Mapping[str, Any],
    *,
    prepare: Prepare | None = None,
    by_rows: bool = False,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """An optimizer from the direction of one leaf: p −= learning_rate·(u + weight_decay·p).

    The direction is u = direction(g, p, s, h). The slots s and the hyperparameters h are
    attributes; h also has `step`, `dtype` and, with `prepare`, `age`.

    Args:
        name: The optimizer's name.
        direction: `(g, p, s, h) -> (u, new slots)`, floating arrays of one dtype. Slots that are
            not returned stay unchanged.
        slots: Name of each slot → its initial value or a `Slot`.
        hyper: Name of each hyperparameter → a number, an array, a schedule or `held`.
            `learning_rate` is required, `weight_decay` optional. A name that jstep's optimizers use
            has their range: a `beta1` is in [0, 1).
        prepare: `prepare(h)` returns values to add to h, computed once for all leaves. h.age is 1
            at the first update of the slots, for bias corrections.
        by_rows: Whether a sparse gradient updates only its rows. Otherwise it is converted to a
            dense one.
        weight_decay_mask: The leaves that decay, as a `var_list`; None for all.

    Raises:
        AttributeError: The direction, or `prepare`, reads a value that does not exist; the error
            lists all that do.
        ValueError: A hyperparameter is out of range, or there is a `weight_decay_mask` without a
            weight_decay.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def direction(g, p, s, h):
        ...     m = h.beta1 * s.m + (1 - h.beta1) * g
        ...     return jnp.sign(m), {"m": m}
        >>> hyper = {"learning_rate": 0.5, "beta1": 0.9}
        >>> optimizer = jstep.from_direction("signed_average", direction, {"m": 0.0}, hyper)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.5
    """
    decay = as_mapping(hyper, "hyper", _HYPER).get("weight_decay")
    if weight_decay_mask is not None and decay is None:
        raise ValueError(
            f"weight_decay_mask={format_value(weight_decay_mask)}: must be None "
            "without a weight_decay in hyper"
        )
    if decay is not None and not isinstance(decay, Decay):
        hyper = {**hyper, "weight_decay": Decay(decay, weight_decay_mask)}

    def rule(g: Array, p: Array, s: Values, h: Values) -> Result:
        u, new = direction(g, p, s, h)
        if "weight_decay" in h:
            u = add_decay(u, p, h)
        return -h.learning_rate * u, new

    return from_update(name, rule, slots, hyper, prepare=prepare, by_rows=by_rows)


def from_update(
    name: str,
    rule: Rule,
    slots: Mapping[str, Any] | Callable[[Params], Mapping[str, Any]],
    hyper: Mapping[str, Any],
    *,
    flags: Mapping[str, Flag] | None = None,
    prepare: Prepare | None = None,
    by_rows: bool = False,
    **sums: Any,
) -> Optimizer:
    """An optimizer whose rule returns the update of a leaf.

    Args:
        slots: Name → initial value, `Slot` or `Scalar`; or a function from params to these. List a
            slot after the slots that are computed from its old value.
        hyper: Hyperparameters, checked by `BOUNDS`. A `weight_decay` is a `Decay`.
        name: As in `from_direction`.
        prepare: As in `from_direction`.
        by_rows: As in `from_direction`.
        **sums: `measure` and `conclude`, as in `leafwise`.
    """
    specs = {} if callable(slots) else as_mapping(slots, "slots", _SLOTS)
    decay = hyper.get("weight_decay")
    if isinstance(decay, Decay):
        hyper = {**hyper, "weight_decay": decay.weight_decay}
        flags = {DECAYED: mask("weight_decay_mask", decay.mask, warns=True), **(flags or {})}
    scalars = {name: slot.initial for name, slot in specs.items() if isinstance(slot, Scalar)}
    others = {name: slot for name, slot in specs.items() if name not in scalars}

    def named_rule(g: Array, p: Array, s: Values, h: Values) -> Result:
        return rule(g, p, s, h)

    named_rule.__name__ = f"{name}{RULE}"
    return leafwise(
        named_rule,
        hyper=as_hyperparameters(hyper),
        slots=slots if callable(slots) else others,
        scalars=scalars,
        flags=flags,
        prepare=prepare,
        aged=prepare is not None,
        sparse=by_rows,
        **sums,
    )


def replace_init(optimizer: Optimizer, **changes: Any) -> Optimizer:
    assert isinstance(optimizer.init, Init)
    return optimizer._replace(init=dataclasses.replace(optimizer.init, **changes))


def checking(optimizer: Optimizer, check: Callable[[Params], Any]) -> Optimizer:
    """Let `init` also call `check(params)`, which raises if the optimizer cannot train them."""
    init = optimizer.init
    assert isinstance(init, Init)

    def make(params: Params, global_step: Step) -> Slots:
        slots = init.make(params, global_step)
        check(params)
        return slots

    return replace_init(optimizer, make=make)


def as_hyperparameters(hyper: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: as_hyperparameter(name, value, **BOUNDS.get(name, {}))
        for name, value in hyper.items()
    }


def positive(name: str, value: Any) -> Any:
    """A hyperparameter > 0 whose range in `BOUNDS` includes 0."""
    return as_hyperparameter(name, value, **POSITIVE)


def decays(h: Values) -> bool:
    """Whether this leaf decays; False only if tracing shows that it does not."""
    return bool(h.decayed) and not is_zero(h.weight_decay)


def add_decay(u: Array, p: Array, h: Values) -> Array:
    return u + h.weight_decay * p if decays(h) else u


def average(old: Array, new: Array, beta: Any) -> Array:
    return beta * old + (1 - beta) * new


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, without cancellation for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)


def is_zero(value: object) -> bool:
    return isinstance(value, float) and value == 0.0


NON_NEGATIVE: dict[str, Any] = {"low": 0}

POSITIVE: dict[str, Any] = {"low": 0, "above": True}

SHARE: dict[str, Any] = {"low": 0, "high": 1}

BETA: dict[str, Any] = {"low": 0, "high": 1, "below": True}

BOUNDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "epsilon", "epsilon_root", "epsilon_scale"), NON_NEGATIVE
    ),
    **dict.fromkeys(
        ("alpha", "momentum_decay", "trust_coefficient", "decay_rate", "weight_lr_power"),
        NON_NEGATIVE,
    ),
    **dict.fromkeys(
        ("l1_regularization_strength", "l2_regularization_strength", "beta"), NON_NEGATIVE
    ),
    **dict.fromkeys(
        ("l2_shrinkage_regularization_strength", "min_step_size", "max_step_size"), NON_NEGATIVE
    ),
    **dict.fromkeys(("clip_threshold", "d0", "d_coef", "radius"), POSITIVE),
    **dict.fromkeys(("momentum", "dampening", "decay", "rho"), SHARE),
    **dict.fromkeys(("beta1", "beta2", "beta3", "shampoo_beta"), BETA),
    "eta_minus": {"low": 0, "high": 1, "above": True, "below": True},
    "eta_plus": {"low": 1, "above": True},
    "growth_rate": {"low": 1},
    "learning_rate_power": {"high": 0},
    "threshold": {"low": 4},
}
"""Name of a hyperparameter → its range, by default."""

RULE = "_rule"


# Optimizers from the update rule of one leaf: `leafwise`.

_HYPER = "from names to numbers, arrays, schedules or held"
_SLOTS = "from names to initial values"
_KEPT = {None: None, "rows": Role.ROWS, "columns": Role.COLUMNS}

MEAN = Slot(holds="mean")
SLOW = Slot(holds="slow")
SQUARE = Slot(holds="square")
COPY = Slot("copy", holds="weight")
MEAN_IN_ORDER = Slot(holds="mean", in_order=True)


@makes_optimizer(1)
def leafwise(
    rule: Rule,
    *,
    hyper: Mapping[str, Any],
    slots: Mapping[str, Any] | Callable[[Params], Mapping[str, Any]] | None = None,
    scalars: Mapping[str, Any] | None = None,
    flags: Mapping[str, Flag] | None = None,
    prepare: Prepare | None = None,
    measure: Callable[[Array, Array, Values, Values], dict[str, Any]] | None = None,
    conclude: Prepare | None = None,
    aged: bool = False,
    sparse: bool = True,
    finished: bool | None = None,
) -> Optimizer:
    """An optimizer that applies a rule to each leaf: `rule(g, p, s, h) -> (update, new slots)`.

    The update is added to the parameter, so it includes the sign and the learning rate. The slots s
    and the hyperparameters h are attributes; h also has the scalar slots, `step`, the leaf's
    `dtype`, `age` if aged, and the values returned by `prepare`, `measure` and `conclude`.

    Args:
        hyper: Name of each hyperparameter → a number, an array, a schedule or `held`.
        slots: Name of each slot → its initial value or a `Slot`; or a function from params to such
            a mapping. List a slot after the slots that are computed from its old value.
        scalars: Name of each scalar slot → its initial value; stored in float32.
        flags: Name → a function from params to a list of static values, one per leaf in order,
            passed to the rule in h.
        prepare: `prepare(h)` returns values to add to h, computed once for all leaves: arrays, or
            Python numbers, bools and strings, which the rule sees as they are. A value with the
            name of a scalar slot is its new value.
        measure: `measure(g, p, slots, h)` returns scalars by name, which are summed over all leaves
            with a gradient before the rule.
        conclude: `conclude(h)` sees these sums in h and returns values as `prepare` does.
        aged: Whether to keep the scalar slot `start_step`; then age = step + 1 − start_step is in
            h.
        sparse: Whether the rule may be applied to some rows of a table only, leaving the other rows
            unchanged. Otherwise sparse gradients are converted to dense ones.
        finished: Whether the updates include −learning_rate; by default, whether `hyper` has a
            learning_rate.

    Raises:
        ValueError: A hyperparameter is not a scalar, or two held ones have the same name; or the
            shape of the update differs from the shape of the gradient.
        TypeError: (at an update) `prepare` or `conclude` returns a value of another kind.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> def rule(g, p, s, h):
        ...     m = h.decay * s.m + (1 - h.decay) * g
        ...     return -h.learning_rate * jnp.sign(m), {"m": m}
        >>> hyper = {"learning_rate": 0.5, "decay": 0.9}
        >>> optimizer = jstep.leafwise(rule, hyper=hyper, slots={"m": 0.0}, sparse=False)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.5
    """
    scalars = {} if scalars is None else as_mapping(scalars, "scalars", _SLOTS)
    flags = {} if flags is None else as_mapping(flags, "flags", "from names to functions of params")
    if slots is not None and not callable(slots):
        as_mapping(slots, "slots", _SLOTS)
    hyper = {
        name: as_hyperparameter(name, value)
        for name, value in as_mapping(hyper, "hyper", _HYPER).items()
    }
    is_finished = hyperparameters.LEARNING_RATE in hyper if finished is None else finished
    hyper_roles = hyperparameters.held_roles(hyper)
    scalar_names = (*([START_STEP] if aged else []), *scalars, *hyper_roles)

    def specs_for(params: Params) -> dict[str, Slot]:
        specs = slots(params) if callable(slots) else slots or {}
        return {
            name: spec if isinstance(spec, Slot) else Slot(spec) for name, spec in specs.items()
        }

    def init(params: Params, global_step: Step = 0) -> Slots:
        for flag in flags.values():
            flag(params)  # a mask that matches nothing raises here, not at the first step
        fresh: Slots = {
            name: fresh_slot(name, spec, params, global_step)
            for name, spec in specs_for(params).items()
        }
        if aged:
            fresh[START_STEP] = new_start_step(global_step)
        fresh |= {name: _scalar(name, value, global_step) for name, value in scalars.items()}
        return fresh | hyperparameters.held_slots(hyper)

    apply_rule = _shared_by_leaves_of_a_shape(
        check_rule_result(rule), sparse=sparse and measure is None
    )
    measure_leaf = measure and _shared_by_leaves_of_a_shape(_as_rule(measure), sparse=False)

    @loads_slots
    def update(
        updates: Updates, state_slots: Slots, params: Params, step: Step, /
    ) -> tuple[Updates, Slots]:
        gradients = match_gradients(updates, params)
        treedef = trees.structure(params)
        specs = specs_for(params)
        leaves = {
            name: slot_leaves(state_slots, name, params, spec.shape) for name, spec in specs.items()
        }
        kept = as_slots(scalar_names, state_slots)
        h = Values(hyperparameters.values_at(hyper, step, state_slots), step=jnp.asarray(step))
        h |= {name: kept[name].astype(trees.default_float()) for name in scalars}
        if aged:
            h["age"] = slot_age(step, kept[START_STEP])
        flag_values = {name: flag(params) for name, flag in flags.items()}
        statics: list[Any] = []
        for i in range(len(gradients)):
            statics.append(_static({name: values[i] for name, values in flag_values.items()}))

        def call_on_leaves(fn: Callable[..., tuple[Any, LeafSlots]]) -> list[Any]:
            """Call a rule on leaves with a gradient, with the current h; update `leaves`."""
            numbers = _static(
                {name: value for name, value in h.items() if isinstance(value, _STATIC)}
            )
            # Without the barrier XLA would fuse a schedule into the kernel of each leaf.
            arrays = jax.lax.optimization_barrier(
                {name: x for name, x in h.items() if trees.is_array(x)}
            )

            def call(g: Any, p: Any, static: Any) -> Any:
                if g is None:
                    return None

                def rule(slots: LeafSlots, g: Any, p: Any, arrays: Hyper) -> Any:
                    return fn(g, p, slots, arrays, (*numbers, *static))

                return rule, g, p, arrays

            return update_leaves(
                params, leaves, map(call, gradients, jax.tree.leaves(params), statics)
            )

        if prepare is not None:
            h |= _check_values(prepare(h), "prepare")
        if measure_leaf is not None:
            terms = [term for term in call_on_leaves(measure_leaf) if term is not None]
            for name in terms[0]:
                h[name] = sum(jnp.asarray(term[name], trees.default_float()) for term in terms)
        if conclude is not None:
            h |= _check_values(conclude(h), "conclude")
        new_updates = call_on_leaves(apply_rule)
        new: Slots = {name: treedef.unflatten(values) for name, values in leaves.items()} | kept
        new |= {name: jnp.asarray(h[name]).astype(kept[name].dtype) for name in scalars}
        return treedef.unflatten(new_updates), new

    def roles(params: Params) -> Roles:
        specs = specs_for(params)
        shared = Roles(dict.fromkeys(scalars, Role.SHARED))
        if aged:
            counted = {CountedSlot(START_STEP, name) for name in (*specs, *scalars)}
            shared = shared.merge(Roles({START_STEP: Role.AGE}, counted=counted))
        return _declared_by(specs).merge(shared).merge(hyper_roles)

    return Optimizer(Init(init, roles, is_finished), update, hyperparameters.report(hyper))


def _declared_by(specs: Mapping[str, Slot]) -> Roles:
    roles: dict[str, Role | None] = {}
    holds: dict[str, str] = {}
    formats: set[str] = set()
    averages: set[str] = set()
    for name, spec in specs.items():
        if spec.averages_params:
            averages.add(name)
        if isinstance(spec.initial, str):
            roles[name] = Role.COPY
        elif spec.averages_params:
            roles[name] = Role.AVERAGE
        else:
            roles[name] = _KEPT[spec.keeps]
        if spec.holds is not None:
            holds[name] = str(spec.holds)
            if spec.dtype is not None:
                formats.add("Slot(dtype=…)")
    return Roles(
        roles,
        holds=holds,
        formats=formats,
        averages=averages,
        computing={name for name, spec in specs.items() if spec.computes_params},
        in_order={name for name, spec in specs.items() if spec.in_order},
    )


_STATIC = (bool, int, float, str)
"""Values that a rule gets as they are, as constants of its program."""


def _check_values(values: dict[str, Any], argument: str) -> dict[str, Any]:
    """Reject values that cannot be passed to the rule, which is compiled."""
    for name, value in values.items():
        if not (isinstance(value, _STATIC) or trees.is_array(value)):
            raise TypeError(
                f"{argument}: must return arrays, numbers, bools and strings, "
                f"got {describe_type(value)} for {name!r}; return its parts under a name each"
            )
    return values


def _as_rule(measure: Callable[..., Any]) -> Callable[..., tuple[Any, LeafSlots]]:
    """Return a rule with the result of `measure`, which changes no slot."""

    @functools.wraps(measure)
    def rule(g: Any, p: Any, slots: Any, h: Any) -> tuple[Any, LeafSlots]:
        return measure(g, p, slots, h), {}

    return rule


def _scalar(name: str, value: object, global_step: Step) -> Array:
    first = value.value if isinstance(value, Held) else value
    return new_arrays.copy_as(
        value_at(f"the initial value of slot {name!r}", first, global_step), jnp.float32
    )


def fresh_slot(name: str, spec: Slot, params: Params, global_step: Step) -> Any:
    is_copy = isinstance(spec.initial, str)
    value: Any = None
    if not is_copy:
        value = value_at(f"the initial value of slot {name!r}", spec.initial, global_step)
    # Copying a slot takes a fifth of the time of creating another of its kind.
    firsts: dict[Any, jax.Array] = {}

    def full_like(leaf: Any, dtype: DTypeLike) -> Array:
        if not isinstance(leaf, jax.Array) or trees.is_traced(leaf):
            return jnp.full_like(leaf, value, dtype=dtype)
        like = leaf.shape, jnp.dtype(dtype), leaf.sharding, leaf.committed
        if like in firsts:
            return new_arrays.copy_of(firsts[like])
        full = new_arrays.full_like(leaf, value, dtype)
        if not trees.is_traced(full):
            firsts[like] = full
        return full

    def leaf_slot(path: str, like: Tree, leaf: object) -> Any:
        if not trees.is_trainable(leaf):
            return None
        dtype = spec.dtype or trees.compute_dtype(jnp.result_type(leaf))
        if is_copy:
            return new_arrays.copy_as(leaf, dtype)
        if spec.shape is None:
            return full_like(leaf, dtype)
        shape = spec.shape(path, like)
        return None if shape is None else new_arrays.full(shape, value, dtype)

    pairs = zip(own_leaves(params), jax.tree.leaves(params), strict=True)
    return trees.structure(params).unflatten(
        [leaf_slot(path, like, leaf) for (path, like), leaf in pairs]
    )


def _static(values: Mapping[str, Any]) -> tuple[tuple[str, Any, str], ...]:
    """Static arguments of a rule, with their reprs, since 1, True and 1.0 are equal."""
    return tuple((name, value, repr(value)) for name, value in values.items())


def _shared_by_leaves_of_a_shape(rule: Callable[..., Any], *, sparse: bool) -> Any:
    """The rule, traced once for all leaves of equal shape and flags."""

    def apply(
        gradient: Tree, leaf: Array, slots: LeafSlots, arrays: Hyper, static: tuple[Any, ...]
    ) -> Any:
        dtype = trees.compute_dtype(leaf.dtype)

        def wide(x: Any) -> Any:
            return x.astype(dtype) if x is not None and trees.is_floating(x.dtype) else x

        def narrow(name: str, x: Any) -> Any:
            old = slots[name]
            return x if old is None or x is None else x.astype(old.dtype)

        # Python floats are not converted: 1 − 0.999 is exact in double precision and off by 5e-5 in
        # float32.
        h = Values({name: value for name, value, _ in static})
        h |= {name: wide(value) for name, value in arrays.items()}
        h["dtype"] = leaf.dtype
        if isinstance(gradient, IndexedSlices) and not sparse:
            gradient = gradient.to_dense()
        if not isinstance(gradient, IndexedSlices):
            result, new = rule(
                gradient.astype(dtype), leaf.astype(dtype), Values(jax.tree.map(wide, slots)), h
            )
            return result, {name: narrow(name, value) for name, value in new.items()}
        rows = combine_rows(gradient)
        if isinstance(rows, RowsInOrder):
            update, new = rule(
                rows.values.astype(dtype), leaf.astype(dtype), Values(jax.tree.map(wide, slots)), h
            )
            kept = {
                name: jnp.where(rows.named, narrow(name, x), slots[name]) for name, x in new.items()
            }
            return trim_slices(dataclasses.replace(rows, values=update)), kept
        # Rows past the end are computed from the last row and dropped.
        old = Values(
            {name: wide(slot.at[rows.indices].get(mode="clip")) for name, slot in slots.items()}
        )
        params_of_rows = leaf.at[rows.indices].get(mode="clip").astype(dtype)
        update, new = rule(rows.values.astype(dtype), params_of_rows, old, h)
        # Indices are unique except for those past the end, so setting is well-defined.
        kept = {
            name: slots[name].at[rows.indices].set(narrow(name, x), mode="drop")
            for name, x in new.items()
        }
        return trim_slices(dataclasses.replace(rows, values=update)), kept

    apply.__name__ = getattr(rule, "__name__", "rule")  # profiles show it
    return jax.jit(apply, static_argnums=4)


def check_rule_result(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a rule to check its result, because a wrong one raises an obscure error about trees."""
    named = getattr(rule, "__name__", "rule")

    @functools.wraps(rule)
    def checked_rule(g: Array, p: Array, slots: Values, h: Values) -> Any:
        result = rule(g, p, slots, h)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise TypeError(
                f"rule={named}: must return (update, {{slot: new value}}), "
                f"got {describe_type(result)}"
            )
        update, new = result
        unknown = sorted(set(new) - set(slots))
        if unknown:
            raise ValueError(
                f"rule={named}: returned the slot {unknown[0]!r}, must be one of {sorted(slots)}"
            )
        if jnp.shape(update) != jnp.shape(g):
            raise ValueError(
                f"rule={named}: must return an update of shape {jnp.shape(g)}, "
                f"got {jnp.shape(update)}"
            )
        return result

    return checked_rule


def new_start_step(global_step: Step) -> Array:
    return new_arrays.copy_as(global_step, trees.default_int())


def slot_age(step: Step, start_step: Array) -> Array:
    """The age of slots at the update from `step` to step + 1: 1 at their first update."""
    # If the step of a state was set back, start_step may be in the future; such slots count as new.
    step = jnp.asarray(step).astype(start_step.dtype)
    return jnp.maximum(step - start_step + 1, 1)


def slot_leaves(
    slots: Slots, name: str, params: Params, shape: Callable[[str, Any], Any] | None = None
) -> list[Any]:
    """Return the leaves of a slot, None for parameters without one; raise if they do not fit."""
    leaves = trees.flatten_like(params, as_slots([name], slots)[name], f"slot {name!r}")
    seen = own_leaves(params) if shape else [("", None)] * len(leaves)
    for i, (slot, leaf) in enumerate(zip(leaves, jax.tree.leaves(params), strict=True)):
        wanted: Any = None
        if trees.is_trainable(leaf):
            wanted = np.shape(leaf) if shape is None else shape(*seen[i])
        got = None if slot is None else np.shape(slot)
        if got != (None if wanted is None else tuple(wanted)):
            path = trees.quote_path(trees.leaf_paths(params)[i])
            raise ValueError(
                f"slot {name!r}: must have shape {wanted} at {path}, got {got}"
                "; create the slots for these params: TrainState.create(params, optimizer)"
            )
    return leaves
