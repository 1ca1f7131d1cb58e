"""The roles of slots, taken from the optimizer that creates them and never inferred from names or shapes.

A `TrainState` carries the roles of its slots as static metadata, so that functions of a state alone know them, too.
"""

import contextvars
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np

from jstep.core.annotations import Tree
from jstep.core.calls import Made
from jstep.core.exceptions import setting
from jstep.core.jaxprs import COPYING, Operation, body_of, evaluate
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Optimizer, Params, Slots, Step, default_int, shape_of, structure


class Role(enum.Enum):
    """The role of a slot that jstep treats specially; a slot with a value for each parameter has none."""

    AGE = "the step at which slots were created; a step without an update advances it"
    OWN_AGE = "the same for an optimizer that skips some steps itself, so that wrappers cannot use it as their age"
    HELD = "a held hyperparameter"
    LOSS_SCALE = "the factor on the loss"

    SCALE_SINCE = "the step of the loss scale's last change"
    LAST_FINITE = "the global step after the last finite update"
    NOISE = "the average of the gradient's noise"
    NOISE_SQUARE = "the average of the gradient's squared norm"
    NOISE_WEIGHT = "the weight of both averages"

    SHARED = "another value for all parameters"
    ROWS = "a value for each row of a parameter"
    COLUMNS = "a value for each column of a parameter"
    COPY = "a value for each parameter, at first a copy of it, in any dtype"
    MASTER = "such a copy, which is the parameter of the optimizer inside"
    MASTER_COPY = "a value for each parameter, at first a copy of its master"
    AVERAGE = "an average of each parameter that begins at zeros, or at values of its own"
    SCALES = "the scales of the codes of another slot"
    REMAINDER = "the bits below those of a bfloat16: of another slot, or of the parameters"


AGES = (Role.AGE, Role.OWN_AGE)
COUNTS = (*AGES, Role.SCALE_SINCE)
"""Slots whose difference from the global step counts updates: a step without an update advances them."""
COPIES = (Role.COPY, Role.MASTER, Role.MASTER_COPY)
"""Slots that begin as copies of the parameters: they follow if the parameters are restored without them."""
WITH_A_START = (*COPIES, Role.AVERAGE)
"""Slots that hold values like those of the parameters, and bring them back if only the parameters are replaced."""
HALVES = (Role.SCALES, Role.REMAINDER)
"""Slots without values of their own: each is half of another slot, or of the parameters."""
OUTERMOST = (Role.LOSS_SCALE, Role.NOISE, Role.NOISE_SQUARE, Role.NOISE_WEIGHT)
"""Slots of wrappers that must see all gradients."""
ACCUMULATED, FOLLOWS_UPDATES, FOLLOWS_STEP = "gradients in a sum", "follows updates", "follows the step"
"""Details of slots: of the number of gradients that wait for an update, and of averages, by when they move."""
_OF_PARAMETERS = (None, Role.ROWS, Role.COLUMNS, *WITH_A_START, *HALVES)


@dataclasses.dataclass(frozen=True)
class Counted:
    """Hyperparameters that depend on a count of updates in the slots, not on the global step.

    Attributes:
        names: The names of those that are schedules.
        at: `at(count)`: their values, and those of others, by name.
        slot: `slot()`: the name of the slot of the count; None if it is not known, after a line of the log that says
            what to do.
        prefix: The prefix of all these names.
        lags: Whether most steps do not advance the count.
    """

    names: frozenset[str]
    at: Callable[[Step], Mapping[str, Any]]
    slot: Callable[[], str | None]
    prefix: str = ""
    lags: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Roles(Mapping[str, Role | None]):
    """Slot name → its role; immutable and hashable, so that it can be static metadata of a pytree.

    Equality is that of metadata: unknown roles fit all others, and how a slot begins makes no difference to a state.
    `dict(roles)` compares the roles themselves.

    Attributes:
        roles: The same as a plain mapping.
        complete: Whether these are all slots of the optimizer; False if its `init` cannot be traced.
        holds: Slot name → what its values are, as `Slot(holds=…)` declares it, for slots of the parameters' shape.
        halves: Name of a slot that is stored as codes, or in bfloat16 → the name of the slot with its other half.
        formats: The names of the wrappers and arguments that decide how numbers are stored.
        hidden: The names of the slots of wrappers that must be outermost and are not, so that their first step raises.
        details: Slot name → what else is known of it: one of the details above, or of a held hyperparameter the name of
            the argument that it was given for.
        counted: Hyperparameters that depend on counts in these slots.
        in_order: The names of the slots whose leaves are updated in a fixed order, as `Slot(in_order=True)` declares.
        warned: The warnings that were logged of the states with these roles, outside of a run.
    """

    roles: Mapping[str, Role | None] = dataclasses.field(default_factory=dict)
    complete: bool = True
    holds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    halves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    formats: Set[str] = frozenset()
    hidden: Set[str] = frozenset()
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counted: tuple[Counted, ...] = ()
    in_order: Set[str] = frozenset()
    warned: set[str] = dataclasses.field(default_factory=set)

    def __getitem__(self, name: str) -> Role | None:
        return self.roles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)

    def __len__(self) -> int:
        return len(self.roles)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Roles):
            return NotImplemented
        one, another = (
            {name: None if role in WITH_A_START else role for name, role in roles.items()} for roles in (self, other)
        )
        # For JAX a state made by hand has the structure of every other with its slots: a carry, in_axes and shardings
        # may be written with the constructor.
        is_unknown = any(not roles and not roles.complete for roles in (self, other))
        return is_unknown or (one == another and self.complete == other.complete)

    def __hash__(self) -> int:
        return hash(Roles)

    def __repr__(self) -> str:
        return f"Roles({', '.join(self.roles)})"

    def prefixed(self, prefix: str) -> "Roles":
        """The same roles under `prefix/name`."""
        return dataclasses.replace(
            self,
            roles={f"{prefix}/{name}": role for name, role in self.items()},
            holds={f"{prefix}/{name}": what for name, what in self.holds.items()},
            halves={f"{prefix}/{name}": f"{prefix}/{half}" for name, half in self.halves.items()},
            hidden={f"{prefix}/{name}" for name in self.hidden},
            details={f"{prefix}/{name}": detail for name, detail in self.details.items()},
            counted=tuple(dataclasses.replace(one, prefix=f"{prefix}/{one.prefix}") for one in self.counted),
            in_order={f"{prefix}/{name}" for name in self.in_order},
        )

    def joined(self, other: "Roles") -> "Roles":
        """The union of these roles and others."""
        return Roles(
            {**self, **other},
            complete=self.complete and other.complete,
            holds={**self.holds, **other.holds},
            halves={**self.halves, **other.halves},
            formats=self.formats | other.formats,
            hidden=self.hidden | other.hidden,
            details={**self.details, **other.details},
            counted=self.counted + other.counted,
            in_order=self.in_order | other.in_order,
        )

    def stored_by(self, format: str) -> "Roles":
        """The roles of an optimizer that a wrapper or an argument of this name makes store numbers in its own way."""
        return self.joined(Roles(formats={format}))

    def hiding(self, *roles: Role) -> "Roles":
        """The roles of an optimizer that does not see all gradients: those of `OUTERMOST`, or some, are hidden."""
        return self.joined(Roles(hidden=set(self.of(*(roles or OUTERMOST)))))

    def ordered(self) -> "Roles":
        """The roles of an optimizer all of whose leaves are updated in a fixed order."""
        return dataclasses.replace(self, in_order=set(self))

    def of_own_age(self) -> "Roles":
        """The roles of an optimizer that skips some steps itself: wrappers do not, so its age is not theirs."""
        return self.changed({Role.AGE: Role.OWN_AGE})

    def at_some_steps(self) -> "Roles":
        """The roles of an optimizer that makes an update at some steps only, by its own decision."""
        counted = tuple(dataclasses.replace(one, lags=True) for one in self.counted)
        return dataclasses.replace(self.of_own_age(), counted=counted)

    def of_state(self) -> "Roles":
        """The roles that a state carries: optimizers with the same slots give states of the same structure."""
        # Without functions, so that a state can be pickled.
        return dataclasses.replace(self.changed({Role.OWN_AGE: Role.AGE}), counted=())

    def of(self, *roles: Role) -> list[str]:
        """The names of the slots that have one of these roles."""
        return [name for name, role in self.items() if role in roles]

    def with_detail(self, *details: str) -> list[str]:
        """The names of the slots that have one of these details."""
        return [name for name, detail in self.details.items() if detail in details]

    def has_one_value(self, name: str) -> bool:
        """Whether a known slot has one value for all parameters."""
        return self[name] not in _OF_PARAMETERS

    def changed(self, changes: Mapping[Role | None, Role]) -> "Roles":
        """The roles with other ones in place of some."""
        return self.joined(Roles({name: changes.get(role, role) for name, role in self.items()}))


NO_ROLES = Roles(complete=False)
"""The roles of a state made by hand."""


def roles_in(state: Tree) -> Roles:
    """The roles of the slots of a state; none for a state made by hand, or of another type."""
    found = getattr(state, "roles", None)
    return found if isinstance(found, Roles) else NO_ROLES


Labels = list[str | None]


@dataclasses.dataclass(frozen=True)
class Order:
    """The place of an optimizer in a chain, as far as it is known; by default nothing is, as of a custom one.

    An update is *raw* if it is known to lack −learning_rate and any other factor that may stand for it, as that of
    blocks, clips and decays does.

    Attributes:
        is_known: Whether all elements are known, finished updates apart.
        raw: Whether its updates are raw if its gradients are.
        partly_raw: Whether they are raw for the leaves of one label at least.
        clips: Whether it clips what it gets.
        late_clip: The description of a clip inside it that clips a finished update; empty if there is none.
    """

    is_known: bool = False
    raw: bool = False
    partly_raw: bool = False
    clips: bool = False
    late_clip: str = ""


BLOCK = Order(is_known=True, raw=True, partly_raw=True)
"""The order of an element that belongs before the learning rate."""
CLIP = dataclasses.replace(BLOCK, clips=True)
SCALE = Order(is_known=True)
"""That of a factor that may stand for −learning_rate."""


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also describes its slots without creating them.

    Attributes:
        make: `make(params, global_step) -> slots`.
        roles: `roles(params)`: the names of the slots that `make` returns, and their roles. It uses no device.
        finished: Whether the updates include −learning_rate, ready to be added to the parameters.
        guarded: Whether gradients that are not finite reach neither parameters nor slots.
        call: The call that made the optimizer, for its `repr`.
        labels: `labels(params)`: the label of each leaf, in order, None for a leaf that is never updated; or None if
            all leaves have the same optimizer.
        order: Its place in a chain.
        rated: Whether all updates have been multiplied by a hyperparameter named learning_rate, held or reported.
    """

    make: Callable[[Params, Step], Slots]
    roles: Callable[[Params], Roles]
    finished: bool = False
    guarded: bool = False
    call: Made | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)
    labels: Callable[[Params], Labels | None] = lambda params: None
    order: Order = Order()
    rated: bool = False

    @shortens_tracebacks
    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """Create the slots for `params` at `global_step`."""
        slots = self.make(params, global_step)
        made = _MADE.get()
        if made is not None:
            roles = self.roles(params)
            made += [(tree, roles[name]) for name, tree in slots.items() if name in roles]
        return slots


_MADE: contextvars.ContextVar[list[tuple[Any, Role | None]] | None] = contextvars.ContextVar("jstep_made", default=None)
"""The slots that optimizers inside a custom one create while its `init` is traced, and their roles."""


def roles_of(optimizer: Optimizer, params: Params) -> Roles:
    """The slots of an optimizer for some parameters, and their roles. Uses no device."""
    init = _unwrapped(optimizer)
    if isinstance(init, Init):
        return init.roles(params)
    declared: dict[str, Role | None] = dict.fromkeys(getattr(optimizer.init, "copies", ()), Role.COPY)
    declared |= dict.fromkeys(getattr(optimizer.init, "ages", ()), Role.AGE)
    try:
        slots, inherited = _traced(init, params)
    except Exception:  # a custom init may need values; its slots are then known only once it has run
        return Roles(declared, complete=False)
    known = copies_in(lambda given: init(given, 0), params) | declared | inherited
    return of_slots(slots, params, known, lambda both: _traced(init, both)[0])


def _unwrapped(optimizer: Optimizer) -> Any:
    """The `init` of an optimizer, without a jit: the slots that it returns are not the objects made inside it."""
    return inspect.unwrap(optimizer.init, stop=lambda f: not isinstance(f, jax.stages.Wrapped))


def labels_of(optimizer: Optimizer, params: Params) -> Labels | None:
    """The labels of `Init`, of any optimizer."""
    init = _unwrapped(optimizer)
    return init.labels(params) if isinstance(init, Init) else None


def order_of(optimizer: Optimizer) -> Order:
    """The `Init.order` of any optimizer."""
    init = _unwrapped(optimizer)
    return init.order if isinstance(init, Init) else Order()


def copies_in(make: Callable[[Params], Slots], params: Params) -> dict[str, Role]:
    """The slots that are copies of the parameters, in any dtype, because a function does nothing else to make them.

    Args:
        make: The function that makes the slots, traced here; if it cannot be traced, no slots are found.
        params: The parameters, or their shapes.
    """

    def sources(operation: Operation, given: list[int | None]) -> list[int | None]:
        """The parameters that the results of an operation are copies of."""
        if operation.kind == "call":
            return evaluate(operation.bodies[0], given, sources, lambda constant: None)
        return given if operation.name in COPYING else [None] * len(operation.eqn.outvars)

    try:
        traced, shapes = jax.make_jaxpr(make, return_shape=True)(params)
    except Exception:  # a custom init may need values
        return {}
    treedef = structure(params)
    found = evaluate(body_of(traced), range(treedef.num_leaves), sources, lambda constant: None)
    numbers: Slots = jax.tree.unflatten(jax.tree.structure(shapes), [-1 if one is None else one for one in found])

    def is_copy(slot: object) -> bool:
        try:
            parts = treedef.flatten_up_to(slot)
        except (ValueError, TypeError):
            return False
        return any(part is not None for part in parts) and all(part in (None, i) for i, part in enumerate(parts))

    return {name: Role.COPY for name, slot in numbers.items() if is_copy(slot)}


def of_slots(slots: Slots, params: Params, known: Mapping[str, Role | None], again: Callable[[Params], Slots]) -> Roles:
    """The roles of slots of which only some are known.

    Args:
        slots: The slots, or their shapes.
        params: The parameters.
        known: The roles of some of the slots.
        again: The function that made the slots, for other parameters. If the parameters are a single leaf, a slot of
            theirs looks like a value of all; for two such leaves it does not.
    """
    single = [name for name in slots if name not in known and jax.tree_util.all_leaves([slots[name]])]
    shared = set(single)
    if single and jax.tree_util.all_leaves([params]):
        try:
            doubled = again([params, params])
            shared = {name for name in single if jax.tree_util.all_leaves([doubled[name]])}
        except Exception:  # it depends on the structure of params: then counts are shared, and nothing else
            shared = {name for name in single if np.issubdtype(getattr(slots[name], "dtype", np.float32), np.integer)}
    return Roles({name: known.get(name, Role.SHARED if name in shared else None) for name in slots})


def _traced(init: Callable[..., Slots], params: Params) -> tuple[Slots, dict[str, Role | None]]:
    """The slots that a custom `init` makes, as tracers' shapes, and the roles of those that jstep's optimizers made."""
    inherited: dict[str, Role | None] = {}
    shapes: Slots = {}

    def trace(step: Step) -> None:
        made: list[tuple[Any, Role | None]] = []
        with setting(_MADE, made):
            slots = init(params, step)
        roles = {id(tree): role for tree, role in made}
        inherited.update({name: roles[id(tree)] for name, tree in slots.items() if id(tree) in roles})
        shapes.update({name: jax.tree.map(_shape, tree) for name, tree in slots.items()})  # no tracer leaves

    abstractly(trace)
    return shapes, inherited


def _shape(leaf: object) -> Any:
    return shape_of(leaf) if hasattr(leaf, "dtype") else leaf


def abstractly(fn: Callable[[Step], None]) -> None:
    """Call `fn` with an abstract step. Uses no device."""
    jax.eval_shape(fn, jax.ShapeDtypeStruct((), default_int()))
