"""The roles of slots, taken from the optimizer that creates them and never inferred from names or shapes.

A `TrainState` carries the roles of its slots as static metadata, so that functions of a state alone know them, too.
"""

import contextvars
import dataclasses
import enum
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import setting
from jstep.core.programs import COPYING, Operation, body_of, evaluate
from jstep.core.trees import Optimizer, Params, Slots, Step


class Role(enum.Enum):
    """The role of a slot that jstep treats specially; a slot with a value for each parameter has none."""

    AGE = "the step at which slots were created; a step without an update advances it"
    OWN_AGE = "the same for an optimizer that skips some steps itself, so that wrappers cannot use it as their age"
    HELD = "a held hyperparameter"
    LOSS_SCALE = "the factor on the loss"
    HIDDEN_SCALE = "a loss scale that is not outermost, which raises when it is used"
    SCALE_SINCE = "the step of the loss scale's last change"
    LAST_FINITE = "the global step after the last finite update"
    NOISE = "the average of the gradient's noise"
    NOISE_SQUARE = "the average of the gradient's squared norm"
    NOISE_WEIGHT = "the weight of both averages"
    HIDDEN_NOISE = "such an average under a label or beside other elements, which raises when it is used"
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
_WITH_A_START = (*COPIES, Role.AVERAGE)
HALVES = (Role.SCALES, Role.REMAINDER)
"""Slots without values of their own: each is half of another slot, or of the parameters."""
_OF_PARAMETERS = (None, Role.ROWS, Role.COLUMNS, *_WITH_A_START, *HALVES)
_HIDDEN: dict[Role | None, Role] = dict.fromkeys((Role.NOISE, Role.NOISE_SQUARE, Role.NOISE_WEIGHT), Role.HIDDEN_NOISE)


class Roles(Mapping[str, Role | None]):
    """Slot name → its role; immutable and hashable, so that it can be static metadata of a pytree.

    Equality is that of metadata: unknown roles fit all others, and how a slot begins makes no difference to a state.
    `dict(roles)` compares the roles themselves.

    Attributes:
        complete: Whether these are all slots of the optimizer; False if its `init` cannot be traced.
        holds: Slot name → what its values are, as `Slot(holds=…)` declares it, for slots of the parameters' shape.
        halves: Name of a slot that is stored as codes, or in bfloat16 → the name of the slot with its other half.
        formats: The names of the wrappers and arguments that decide how numbers are stored.
    """

    def __init__(
        self,
        roles: Mapping[str, Role | None] | Iterable[str] = (),
        *,
        complete: bool = True,
        holds: Mapping[str, str] = MappingProxyType({}),
        halves: Mapping[str, str] = MappingProxyType({}),
        formats: Collection[str] = (),
    ) -> None:
        self._roles = dict(roles) if isinstance(roles, Mapping) else dict.fromkeys(roles)
        self.complete = complete
        self.holds, self.halves, self.formats = dict(holds), dict(halves), frozenset(formats)

    def __getitem__(self, name: str) -> Role | None:
        return self._roles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def __len__(self) -> int:
        return len(self._roles)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Roles):
            return NotImplemented
        same = self._of_structure() == other._of_structure() and self.complete == other.complete
        # For JAX a state made by hand has the structure of every other with its slots: a carry, in_axes and shardings
        # may be written with the constructor.
        return same or self._are_unknown or other._are_unknown

    def __hash__(self) -> int:
        return hash(Roles)

    def __repr__(self) -> str:
        return f"Roles({', '.join(self._roles)})"

    def _of_structure(self) -> dict[str, Role | None]:
        return {name: None if role in _WITH_A_START else role for name, role in self.items()}

    @property
    def _are_unknown(self) -> bool:
        return not self._roles and not self.complete

    def prefixed(self, prefix: str) -> "Roles":
        """The same roles under `prefix/name`."""
        return Roles(
            {f"{prefix}/{name}": role for name, role in self.items()},
            complete=self.complete,
            holds={f"{prefix}/{name}": what for name, what in self.holds.items()},
            halves={f"{prefix}/{name}": f"{prefix}/{half}" for name, half in self.halves.items()},
            formats=self.formats,
        )

    def joined(self, other: "Roles") -> "Roles":
        """The union of these roles and others."""
        return Roles(
            {**self, **other},
            complete=self.complete and other.complete,
            holds={**self.holds, **other.holds},
            halves={**self.halves, **other.halves},
            formats=self.formats | other.formats,
        )

    def stored_by(self, format: str) -> "Roles":
        """The roles of an optimizer that a wrapper or an argument of this name makes store numbers in its own way."""
        return self.joined(Roles(formats=(format,)))

    def beside_others(self) -> "Roles":
        """The roles of one part of an optimizer, where wrappers that must be outermost are hidden."""
        roles = self.without_scale()
        return roles.joined(Roles({name: _HIDDEN.get(role, role) for name, role in roles.items()}))

    def without_scale(self) -> "Roles":
        """The roles of an optimizer that does not see all gradients, so its loss scale is not outermost."""
        return self._changed({Role.LOSS_SCALE: Role.HIDDEN_SCALE})

    def of_own_age(self) -> "Roles":
        """The roles of an optimizer that skips some steps itself: wrappers do not, so its age is not theirs."""
        return self._changed({Role.AGE: Role.OWN_AGE})

    def within_masters(self) -> "Roles":
        """The roles of an optimizer whose parameters are master weights."""
        return self._changed(dict.fromkeys((Role.COPY, Role.MASTER), Role.MASTER_COPY))

    def of_state(self) -> "Roles":
        """The roles that a state carries: optimizers with the same slots give states of the same structure."""
        return self._changed({Role.OWN_AGE: Role.AGE, Role.HIDDEN_SCALE: Role.LOSS_SCALE})

    def of(self, *roles: Role) -> list[str]:
        """The names of the slots that have one of these roles."""
        return [name for name, role in self.items() if role in roles]

    def has_one_value(self, name: str) -> bool:
        """Whether a known slot has one value for all parameters."""
        return self[name] not in _OF_PARAMETERS

    def _changed(self, changes: Mapping[Role | None, Role]) -> "Roles":
        return self.joined(Roles({name: changes.get(role, role) for name, role in self.items()}))


NO_ROLES = Roles(complete=False)
"""The roles of a state made by hand."""


def roles_in(state: Any) -> Roles:
    """The roles of the slots of a state; none for a state made by hand, or of another type."""
    found = getattr(state, "roles", None)
    return found if isinstance(found, Roles) else NO_ROLES


Labels = list[str | None]


@dataclasses.dataclass(frozen=True)
class Init:
    """An `Optimizer.init` that also describes its slots without creating them.

    Attributes:
        make: `make(params, global_step) -> slots`.
        roles: `roles(params)`: the names of the slots that `make` returns, and their roles. It uses no device.
        finished: Whether the updates include −learning_rate, ready to be added to the parameters.
        guarded: Whether gradients that are not finite reach neither parameters nor slots.
        labels: `labels(params)`: the label of each leaf, in order, None for a leaf that is never updated; or None if
            all leaves have the same optimizer.
    """

    make: Callable[[Params, Step], Slots]
    roles: Callable[[Params], Roles]
    finished: bool = False
    guarded: bool = False
    labels: Callable[[Params], Labels | None] = lambda params: None

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


def copies_in(make: Callable[[Params], Slots], params: Params) -> dict[str, Role]:
    """The slots that are copies of the parameters, in any dtype, because a function does nothing else to make them.

    Args:
        make: The function that makes the slots, traced here; if it cannot be traced, no slots are found.
        params: The parameters, or their shapes.
    """

    def nothing(constant: Any) -> None:
        return None

    def sources(operation: Operation, given: list[int | None]) -> list[int | None]:
        """The parameters that the results of an operation are copies of."""
        if operation.kind == "call":
            return evaluate(operation.bodies[0], given, sources, nothing)
        return given if operation.eqn.primitive.name in COPYING else [None] * len(operation.eqn.outvars)

    try:
        traced, shapes = jax.make_jaxpr(make, return_shape=True)(params)
    except Exception:  # a custom init may need values
        return {}
    treedef = trees.structure(params)
    found = evaluate(body_of(traced), range(treedef.num_leaves), sources, nothing)
    numbers: Slots = jax.tree.unflatten(jax.tree.structure(shapes), [-1 if one is None else one for one in found])

    def is_copy(slot: Any) -> bool:
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


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) if hasattr(leaf, "dtype") else leaf


def abstractly(fn: Callable[[Step], None]) -> None:
    """Call `fn` with an abstract step. Uses no device."""
    jax.eval_shape(fn, jax.ShapeDtypeStruct((), trees.default_int()))
