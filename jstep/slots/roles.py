"""The roles of slots, declared by the optimizer that creates them.

They are never inferred from names or shapes. A `TrainState` carries the roles of its slots as
static metadata.
"""

import contextvars
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.exceptions import setting
from jstep.core.jaxprs import body_of, copied_inputs
from jstep.core.recorded_calls import RecordedCall
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Optimizer, Params, Slots, Step, Tree, default_int, shape_of, structure


class Role(enum.Enum):
    """The role of a slot that jstep treats specially.

    A slot with a value for each parameter has none.
    """

    AGE = "the step at which slots were created; a step without an update advances it"
    PRIVATE_AGE = (
        "an age of an optimizer that skips some steps itself, "
        "so that wrappers cannot use it as theirs"
    )
    HELD = "a held hyperparameter"
    LOSS_SCALE = "the factor on the loss"

    SCALE_SINCE = "the step of the loss scale's last change"
    LAST_FINITE = "the global step after the last finite update"
    NOISE = "the average of the gradient's noise"
    NOISE_SQUARE = "the average of the gradient's squared norm"
    NOISE_WEIGHT = "the weight of the averages of the gradient's noise and squared norm"
    LAST_WEIGHT = "the weight of new values in averages at the last update; 0 before each update"

    DRAWN = "the step of the latest random numbers, or how many updates of that step drew some"
    SHARED = "a value shared by all parameters, with no other role"
    ROWS = "a value for each row of a parameter"
    COLUMNS = "a value for each column of a parameter"
    COPY = "a value for each parameter, at first a copy of it, in any dtype"
    MASTER = "the full-precision copy of a parameter that the inner optimizer updates"
    MASTER_COPY = "a value for each parameter, at first a copy of its master"
    AVERAGE = "an average of each parameter that begins at zeros, or at values of its own"
    SCALES = "the scales of the codes of another slot"
    REMAINDER = "the 8 bits that follow a bfloat16: a value of another slot, or a parameter"


AGES = (Role.AGE, Role.PRIVATE_AGE)
COUNTS = (*AGES, Role.SCALE_SINCE)
"""Slots whose difference from the global step counts updates."""
COPIES = (Role.COPY, Role.MASTER, Role.MASTER_COPY)
LIKE_PARAMETERS = (*COPIES, Role.AVERAGE)
HALVES = (Role.SCALES, Role.REMAINDER)
"""Slots that complete another slot, or the parameters."""
OUTERMOST = (Role.LOSS_SCALE, Role.NOISE, Role.NOISE_SQUARE, Role.NOISE_WEIGHT)
"""Slots of wrappers that must see all gradients."""
_PARAMETER_ROLES = (None, Role.ROWS, Role.COLUMNS, *LIKE_PARAMETERS, *HALVES)


class CountedSlot(NamedTuple):
    """Leaves of a slot whose updates an age counts.

    Attributes:
        keys: JAX's keys of a parameter, if only the leaf of this parameter is counted by the age:
            below the labels of a `partition`, the leaves of one slot of a wrapper have different
            ages. Not the parameter's index, which is another one in the optimizer of a label.
    """

    age: str
    slot: str
    keys: tuple[Any, ...] | None = None


class ActsByStep(NamedTuple):
    """A wrapper that acts at some global steps only, and JAX's keys of the parameters it sees."""

    description: str
    leaves: frozenset[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, repr=False)
class Roles(Mapping[str, Role | None]):
    """Slot name → its role.

    This is immutable and hashable static metadata of a pytree, which JAX's cache compares.

    Attributes:
        complete: Whether these are all slots; False if `init` cannot be traced.
        holds: As in `Slot(holds=…)`, for slots of the parameters' shape.
        halves: Name of a slot that `compact` stores in two arrays → the name of the second.
        formats: The wrappers and arguments that decide how numbers are stored.
        misplaced: Slots of wrappers that must be outermost, but are not.
        arguments: Slot of a held hyperparameter → the argument that it was passed for.
        averages: Slots that an optimizer declares as averages of the parameters, whatever they
            begin as.
        computing, in_order: As in `Slot(computes_params=True, in_order=True)`.
        per_step: Slots that change once a step.
        by_step: The wrappers that act at some global steps only.
        counted: The slots whose updates each age counts.
        injected: Slots with the numbers that `optax.inject_hyperparams` was given, without its
            schedules.
        frozen: In a state, the indices of the parameters that the optimizer trains under no label.
    """

    roles: Mapping[str, Role | None] = dataclasses.field(default_factory=dict)
    complete: bool = True
    holds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    halves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    formats: Set[str] = frozenset()
    misplaced: Set[str] = frozenset()
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    averages: Set[str] = frozenset()
    computing: Set[str] = frozenset()
    in_order: Set[str] = frozenset()
    per_step: Set[str] = frozenset()
    by_step: Set[ActsByStep] = frozenset()
    counted: Set[CountedSlot] = frozenset()
    injected: Set[str] = frozenset()
    frozen: Set[int] = frozenset()

    def __getitem__(self, name: str) -> Role | None:
        return self.roles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)

    def __len__(self) -> int:
        return len(self.roles)

    def __hash__(self) -> int:
        return hash(frozenset(self.roles.items()))

    def __repr__(self) -> str:
        # JAX's errors about two structures show it.
        return f"Roles({', '.join(self.roles) or _NO_NAMES})"

    def prefixed(self, prefix: str) -> "Roles":
        """Return the roles of the same slots, with a prefix in all names of slots."""

        def prefix_all(names: Iterable[str]) -> set[str]:
            return {f"{prefix}/{name}" for name in names}

        def prefix_keys(values: Mapping[str, Any]) -> dict[str, Any]:
            return {f"{prefix}/{name}": value for name, value in values.items()}

        counted = set()
        for entry in self.counted:
            counted.add(entry._replace(age=f"{prefix}/{entry.age}", slot=f"{prefix}/{entry.slot}"))
        return dataclasses.replace(
            self,
            injected=prefix_all(self.injected),
            roles=prefix_keys(self.roles),
            holds=prefix_keys(self.holds),
            halves={f"{prefix}/{name}": f"{prefix}/{half}" for name, half in self.halves.items()},
            misplaced=prefix_all(self.misplaced),
            arguments=prefix_keys(self.arguments),
            averages=prefix_all(self.averages),
            computing=prefix_all(self.computing),
            in_order=prefix_all(self.in_order),
            per_step=prefix_all(self.per_step),
            counted=counted,
        )

    def merge(self, other: "Roles") -> "Roles":
        """Return the roles of the slots of both; if both have a slot, the role in `other`."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "complete"]
        unions: dict[str, Any] = {
            name: getattr(self, name) | getattr(other, name) for name in names
        }
        return Roles(**unions, complete=self.complete and other.complete)

    def with_format(self, format: str) -> "Roles":
        return self.merge(Roles(formats={format}))

    def with_misplaced(self, *roles: Role) -> "Roles":
        """Note a wrapper around slots of these roles, by default all that must be outermost."""
        return self.merge(Roles(misplaced=set(self.names_with(*(roles or OUTERMOST)))))

    def with_order(self) -> "Roles":
        """Note that something other than its new value is computed from each slot's old value."""
        return dataclasses.replace(self, in_order=set(self))

    def with_private_age(self) -> "Roles":
        """Hide the age from wrappers, because the optimizer skips some steps itself."""
        return self.replace_roles({Role.AGE: Role.PRIVATE_AGE})

    def static_part(self) -> "Roles":
        """The roles in a state: optimizers with equal slots give states of equal structure."""
        roles = self.replace_roles({Role.PRIVATE_AGE: Role.AGE}).roles
        return Roles(
            roles,
            halves=self.halves,
            arguments=self.arguments,
            averages=self.averages,
            computing=self.computing,
            counted=self.counted,
            injected=self.injected,
        )

    def names_with(self, *roles: Role) -> list[str]:
        """Return the slots that have one of these roles."""
        return [name for name, role in self.items() if role in roles]

    def has_one_value(self, name: str) -> bool:
        return self[name] not in _PARAMETER_ROLES

    def replace_roles(self, changes: Mapping[Role | None, Role]) -> "Roles":
        """Return these roles, with roles that are keys of `changes` replaced by their values."""
        return self.merge(Roles({name: changes.get(role, role) for name, role in self.items()}))


_NO_NAMES = "none; state.replace(…) keeps them, TrainState(…) does not"
NO_ROLES = Roles()


def roles_in(state: Tree) -> Roles:
    """The roles of a state's slots; `NO_ROLES` for a state made by hand, or of another type."""
    roles = getattr(state, "roles", None)
    return roles if isinstance(roles, Roles) else NO_ROLES


Labels = list[str | None]


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also describes its slots without creating them.

    Attributes:
        roles: `roles(params)`: the roles of all slots. It uses no device.
        finished: Whether the updates include −learning_rate.
        negates: Whether it changes the sign of the updates by a negative factor, besides the
            −learning_rate.
        labels: `labels(params)`: the label of each leaf, None if it is never updated; or None
            without labels.
        needs_all: Whether it must get all parameters, also frozen ones.
    """

    make: Callable[[Params, Step], Slots]
    roles: Callable[[Params], Roles]
    finished: bool = False
    guarded: bool = False
    call: RecordedCall | None = dataclasses.field(
        default=None, compare=False, repr=False, kw_only=True
    )
    labels: Callable[[Params], Labels | None] = lambda params: None
    needs_all: bool = False
    negates: bool = False

    @shortens_tracebacks
    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        slots = self.make(params, global_step)
        collected = _MADE.get()
        if collected is not None:
            collected.append((slots, self.roles(params)))
        return slots


_MADE: contextvars.ContextVar[list[tuple[Slots, Roles]] | None] = contextvars.ContextVar(
    "jstep_made", default=None
)
"""The slots that inner optimizers create while an `init` is traced, and their roles."""


def roles_of(optimizer: Optimizer, params: Params) -> Roles:
    init = _unwrapped(optimizer)
    if isinstance(init, Init):
        return init.roles(params)
    # A custom `init`.
    averages = frozenset(getattr(optimizer.init, "averages", ()))
    copies = getattr(optimizer.init, "copies", ())
    declared: dict[str, Role | None] = dict.fromkeys(copies, Role.COPY)
    declared |= dict.fromkeys(getattr(optimizer.init, "ages", ()), Role.AGE)
    try:
        slots, inherited = _traced(init, params)
    except Exception:  # a custom init may need values: its slots are unknown until it has run
        return Roles(
            dict.fromkeys(averages, Role.AVERAGE) | declared, complete=False, averages=averages
        )
    known: dict[str, Role | None] = dict.fromkeys(averages, Role.AVERAGE)
    known |= copies_in(lambda tree: init(tree, 0), params) | declared | dict(inherited.roles)
    inferred = infer_roles(slots, params, known, lambda both: _traced(init, both)[0])
    # A custom `init` declares ages without their slots, so each counts the updates of all slots.
    ages = [name for name, role in declared.items() if role is Role.AGE]
    values = [name for name in slots if inferred[name] not in (*COUNTS, Role.HELD)]
    counted: set[CountedSlot] = set()
    for age in ages:
        counted.update(CountedSlot(age, name) for name in values)
    return inferred.merge(
        Roles(
            averages=averages | inherited.averages,
            counted=counted | inherited.counted,
            injected=inherited.injected,
        )
    )


def _unwrapped(optimizer: Optimizer) -> Any:
    """Return the `init` without its jit, which would return copies of the objects made in it."""
    return inspect.unwrap(optimizer.init, stop=lambda f: not isinstance(f, jax.stages.Wrapped))


def init_labels(optimizer: Optimizer, params: Params) -> Labels | None:
    init = _unwrapped(optimizer)
    return init.labels(params) if isinstance(init, Init) else None


def state_roles(optimizer: Optimizer, params: Params) -> Roles:
    labels = init_labels(optimizer, params) or []
    frozen = frozenset(i for i, label in enumerate(labels) if label is None)
    return dataclasses.replace(roles_of(optimizer, params).static_part(), frozen=frozen)


def needs_all_params(optimizer: Optimizer) -> bool:
    init = _unwrapped(optimizer)
    # A custom `init` may need all of them.
    return not isinstance(init, Init) or init.needs_all


def copies_in(make: Callable[[Params], Slots], params: Params) -> dict[str, Role]:
    """The slots that are plain copies of the parameters, in any dtype, in a trace of `make`."""
    try:
        traced, shapes = jax.make_jaxpr(make, return_shape=True)(params)
    except Exception:  # a custom init may need values
        return {}
    treedef = structure(params)
    indices = copied_inputs(body_of(traced))
    # Index of the parameter that an array is a copy of; −1 for any other array.
    sources = [-1 if i is None else i for i in indices]
    numbers: Slots = jax.tree.unflatten(jax.tree.structure(shapes), sources)

    def is_copy(slot: object) -> bool:
        try:
            parts = treedef.flatten_up_to(slot)
        except (ValueError, TypeError):
            return False
        if all(part is None for part in parts):
            return False
        return all(part in (None, i) for i, part in enumerate(parts))

    return {name: Role.COPY for name, slot in numbers.items() if is_copy(slot)}


def infer_roles(
    slots: Slots, params: Params, known: Mapping[str, Role | None], again: Callable[[Params], Slots]
) -> Roles:
    """The roles of all slots if only some are known; `again` is the function that made them."""
    # If the parameters are a single leaf, a slot of that leaf looks like a value for all
    # parameters. With two leaves it does not.
    single = [
        name for name in slots if name not in known and jax.tree_util.all_leaves([slots[name]])
    ]
    shared = set(single)
    if single and jax.tree_util.all_leaves([params]):
        try:
            doubled = again([params, params])
            shared = {name for name in single if jax.tree_util.all_leaves([doubled[name]])}
        except Exception:  # it depends on the structure of params: only counts are shared then
            dtypes = {name: getattr(slots[name], "dtype", np.float32) for name in single}
            shared = {name for name in single if np.issubdtype(dtypes[name], np.integer)}
    roles: dict[str, Role | None] = {}
    for name in slots:
        if name in known:
            roles[name] = known[name]
        else:
            roles[name] = Role.SHARED if name in shared else None
    return Roles(roles)


def _traced(init: Callable[..., Slots], params: Params) -> tuple[Slots, Roles]:
    """Return the shapes of a custom `init`'s slots, and the roles of slots of inner optimizers."""
    inherited = Roles()
    shapes: Slots = {}

    def trace(step: Step) -> None:
        nonlocal inherited
        collected: list[tuple[Slots, Roles]] = []
        with setting(_MADE, collected):
            slots = init(params, step)
        # A custom optimizer may rename the slots of inner ones: the same tree is the same slot.
        names = {id(tree): name for name, tree in slots.items()}
        for made, roles in collected:
            new_names = {name: names.get(id(tree)) for name, tree in made.items()}
            inherited = inherited.merge(_rename(roles, new_names))
        # Only shapes are kept, so that no tracer leaves the trace.
        shapes.update({name: jax.tree.map(_shape, tree) for name, tree in slots.items()})

    abstractly(trace)
    return shapes, inherited


def _rename(roles: Roles, names: Mapping[str, str | None]) -> Roles:
    """Return the roles and ages of slots by new names, without slots whose name is None."""
    renamed: dict[str, Role | None] = {}
    for old, new in names.items():
        if new is not None and old in roles:
            renamed[new] = roles[old]
    counted = set[CountedSlot]()
    for age, slot, keys in roles.counted:
        new_age = names.get(age)
        new_slot = names.get(slot)
        if new_age is not None and new_slot is not None:
            counted.add(CountedSlot(new_age, new_slot, keys))
    averages = {new for old, new in names.items() if new is not None and old in roles.averages}
    injected = {new for old, new in names.items() if new is not None and old in roles.injected}
    return Roles(renamed, averages=averages, counted=counted, injected=injected)


def _shape(leaf: object) -> Any:
    return shape_of(leaf) if hasattr(leaf, "dtype") else leaf


def abstractly(fn: Callable[[Step], None]) -> None:
    """Call `fn` with an abstract step. Uses no device."""
    jax.eval_shape(fn, jax.ShapeDtypeStruct((), default_int()))
