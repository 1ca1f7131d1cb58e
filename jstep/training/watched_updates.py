"""Updates of a train step, seen while it is traced; warnings about likely mistakes.

These are warnings and not errors, because each of these programs is sometimes intended.
"""

import contextlib
import contextvars
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core import processes, trees
from jstep.core.checks import format_list
from jstep.core.exceptions import setting
from jstep.core.logs import log_once
from jstep.core.trees import Optimizer, Params, Tree, Updates
from jstep.differentiate.loss_gradients import UNUSED
from jstep.slots.indexed_slices import is_slices
from jstep.slots.roles import AGES, Labels, Roles, init_labels
from jstep.state.copies import IS_STEPPING


class MadeUpdate(NamedTuple):
    """An update that a step has made.

    Attributes:
        hyperparameters: The optimizer's function of this name, which identifies the update.
        structure: The structure of the state.
        is_traced: Whether it was traced. A function that the user compiles is traced once, and
            makes the update unseen from then on; an update that is not traced is seen at each call.
    """

    hyperparameters: Callable[[Any], dict[str, Any]]
    structure: Any
    is_traced: bool

    def is_in(self, others: Sequence["MadeUpdate"]) -> bool:
        return any(self.hyperparameters is other.hyperparameters for other in others)


def has_unknown(known: Sequence[MadeUpdate], seen: Sequence[MadeUpdate]) -> bool:
    """Whether an update was traced that is not one of the known ones."""
    return any(update.is_traced and not update.is_in(known) for update in seen)


def join_updates(known: Sequence[MadeUpdate], seen: Sequence[MadeUpdate]) -> list[MadeUpdate]:
    """Return the updates of a call that made the seen ones, and perhaps compiled known ones.

    The known ones come first, in their order: if two hyperparameters have one name, the later one
    is reported.
    """
    if has_unknown(known, seen):
        # Whether this call also makes the known ones is not known.
        return [*seen]
    joined = [update for update in known if update.is_traced or update.is_in(seen)]
    return joined + [update for update in seen if not update.is_in(known)]


@dataclasses.dataclass
class StepUpdates:
    """What the updates of a step train, by the paths of leaves.

    Attributes:
        updated: Leaves with a gradient in some update.
        aged: Leaves without a gradient in an update that their age counts.
        unused: Leaves on which a loss does not depend.
        per_step: Averages that move once a step.
        increments: Whether an update increments the step, or `increment_global_step` has moved
            these averages.
        age_of: Leaf → the label whose age counts its updates, for leaves that have one.
        made: The updates, one for each optimizer and structure of the state.
        has_varied: Whether calls of the step have made different compiled updates: those of another
            call are unknown.
        rounded: Leaf → its dtype of 16 bits, if an optimizer updates it that does not keep what is
            rounded away.
        repeated: Wrappers that are due at some steps only (`Roles.by_step`), and are updated
            several times in one step.
        step: The global step of the state that was passed to the train step.
        counts: A wrapper that is due at some steps only, and the id of the global step of an update
            → the global step and the number of such updates. The global step is kept, so that its
            id stays unique.
    """

    updated: set[str] = dataclasses.field(default_factory=set)
    aged: set[str] = dataclasses.field(default_factory=set)
    unused: set[str] = dataclasses.field(default_factory=set)
    per_step: set[str] = dataclasses.field(default_factory=set)
    increments: bool = False
    age_of: dict[str, str | None] = dataclasses.field(default_factory=dict)
    made: list[MadeUpdate] = dataclasses.field(default_factory=list)
    has_varied: bool = False
    rounded: dict[str, Any] = dataclasses.field(default_factory=dict)
    repeated: set[str] = dataclasses.field(default_factory=set)
    step: Any = None
    counts: dict[tuple[str, int], tuple[Any, int]] = dataclasses.field(default_factory=dict)

    def add_optimizer(self, optimizer: Optimizer, state: Any) -> None:
        update = MadeUpdate(
            optimizer.hyperparameters, trees.structure(state), trees.has_tracers(state)
        )
        if not update.is_in(self.made_to(update.structure)):
            self.made.append(update)

    def made_to(self, structure: Any) -> list[MadeUpdate]:
        """Return the updates of states of this structure.

        A nested state has a step of its own, and perhaps values that exist in a loop only: what its
        optimizer reports is for the user to return.
        """
        return [update for update in self.made if update.structure == structure]

    def add_known(self, known: "StepUpdates") -> None:
        """Add what was known of the same step before."""
        self.has_varied |= known.has_varied
        structures: list[Any] = []
        for update in [*known.made, *self.made]:
            if update.structure not in structures:
                structures.append(update.structure)
        made: list[MadeUpdate] = []
        for structure in structures:
            before = known.made_to(structure)
            seen = self.made_to(structure)
            has_compiled = any(update.is_traced for update in before)
            self.has_varied |= has_compiled and has_unknown(before, seen)
            made += join_updates(before, seen)
        self.made = made

    def note_due(self, name: str, step: object, *, increments: bool) -> None:
        """Note an update of a wrapper that is due at some steps only."""
        _, count = self.counts.get((name, id(step)), (step, 0))
        self.counts[name, id(step)] = step, count + 1
        # A loop is traced once, with a global step of its own. An update in it that does not
        # increment the step makes sense only if there are several.
        is_in_loop = step is not self.step and not increments
        if count or is_in_loop:
            self.repeated.add(name)


_UPDATES: contextvars.ContextVar[StepUpdates | None] = contextvars.ContextVar(
    "jstep_updates", default=None
)


@contextlib.contextmanager
def watch_updates(state: Tree = None) -> Iterator[StepUpdates]:
    """Collect the updates of a step in this context, and then warn of them.

    `state` is the state that is passed to the step.
    """
    outer = _UPDATES.get()
    step = getattr(state, "global_step", None)
    if outer is not None:  # a step inside of another one, or one whose program is being traced
        if outer.step is None:
            outer.step = step
        yield outer
        return
    with (
        setting(_UPDATES, StepUpdates(step=step)) as found,
        setting(UNUSED, found.unused),
        setting(IS_STEPPING, True),
    ):
        yield found
    _warn(found)
    found.step = None
    found.counts.clear()


_ONCE_A_STEP = (
    "An average moves once a step with ExponentialMovingAverage(…, per_step=True), "
    "if all updates of the step have increment_global_step=False and it ends with state = "
    "jstep.increment_global_step(state, optimizer=optimizer)"
)


def _warn(found: StepUpdates) -> None:
    leaves = sorted(map(repr, found.unused & found.updated & found.aged))
    if leaves:
        log_once(
            logging.WARNING,
            f"one update of the step has no gradient of {format_list(leaves)}, "
            "and another one has: the age of its slots, which corrects the bias of averages, "
            "counts both (in PyTorch a parameter's own updates). Otherwise add a term 0 * … of it "
            "to the loss that does not use it, or give it a label of its own in a jstep.partition",
        )
    if found.per_step and not found.increments:
        log_once(
            logging.WARNING,
            f"the averages {format_list(sorted(map(repr, found.per_step)))} never move: "
            f"no update of this step increments the global step. {_ONCE_A_STEP}",
        )
    if found.repeated:
        log_once(
            logging.WARNING,
            f"the step makes several updates, and {format_list(sorted(found.repeated))} "
            "looks at the global step, which they share: in most steps it makes none of them, "
            "and in every k-th step all. To accumulate gradients within a step, "
            "use minimize(num_microbatches=k); keep update_every outside of such steps, "
            f"where a step is one update. {_ONCE_A_STEP}",
        )


_EXACT_FORMATS = {"master_weights", "stochastic_rounding", "compact"}
"""Wrappers with which small updates of 16-bit parameters are not lost."""


def note_step(optimizer: Optimizer | None, state: Any) -> None:
    """Note the optimizer of a compiled step in another one: it may have been traced before."""
    found = _UPDATES.get()
    if found is not None and optimizer is not None:
        found.add_optimizer(optimizer, state)


def note_end() -> None:
    """Note that what moves once a step has moved."""
    found = _UPDATES.get()
    if found is not None:
        found.increments = True


def note_update(
    optimizer: Optimizer, state: Any, gradients: Updates, roles: Roles, *, increments: bool
) -> None:
    found = _UPDATES.get()
    if found is None:
        return
    params: Params = state.params
    step = state.global_step
    found.add_optimizer(optimizer, state)
    leaves = trees.flatten_like(params, gradients, "gradients", is_leaf=is_slices)
    labels = init_labels(optimizer, params) or [""] * len(leaves)
    named = list(zip(trees.leaf_paths(params), labels, leaves, strict=True))
    trained = {label for _, label, gradient in named if gradient is not None}
    aging = _labels_with_age(roles.names_with(*AGES), labels)
    found.per_step |= roles.per_step
    found.increments |= increments
    for path, label, gradient in named:
        if label in aging:
            found.age_of[path] = label
        if gradient is not None:
            found.updated.add(path)
        elif label in trained and label in aging:
            # The age of its label counts this update, which does not reach it.
            found.aged.add(path)
    if not roles.formats & _EXACT_FORMATS:
        for (path, label, gradient), leaf in zip(named, jax.tree.leaves(params), strict=True):
            is_trained = gradient is not None and label is not None
            if is_trained and getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16):
                found.rounded[path] = leaf.dtype
    if not roles.by_step:
        return
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(params)]
    updated_keys = {key for key, gradient in zip(keys, leaves, strict=True) if gradient is not None}
    for wrapper in roles.by_step:
        if wrapper.leaves & updated_keys:
            found.note_due(wrapper.description, step, increments=increments)


def _labels_with_age(ages: Collection[str], labels: Labels) -> set[str | None]:
    """Return the labels to which these ages belong: all, if one age is above the labels."""
    all_labels = {*labels}
    aging = set[str | None]()
    for age in ages:
        # With labels 'a' and 'a/b', the age 'a/b/start_step' belongs to 'a/b', the longer one.
        owners = [
            label for label in all_labels if label is not None and age.startswith(f"{label}/")
        ]
        if not owners:
            return all_labels
        aging.add(max(owners, key=len))
    return aging


# A stage that trains leaves for the first time, with an age that counted the updates of others.

_KNOWN_UPDATES = "_jstep_updates"


class _WeaklyKnown(NamedTuple):
    """What is known of a step that has no attributes of its own, such as a bound method.

    A schedule may use the object to which the method belongs. So functions are not kept alive, as
    they would in turn keep this object alive, for the life of the process.
    """

    owner: weakref.ref[Any]
    found: StepUpdates  # without `made`
    made: list[tuple[weakref.ref[Any], Any, bool]]  # the fields of each `MadeUpdate`


_WEAKLY_KNOWN: dict[tuple[int, Any], _WeaklyKnown] = {}
"""By the id of the step's object, while it is alive, and the method."""


def _object_and_method(step: Any) -> tuple[Any, Any]:
    return getattr(step, "__self__", step), getattr(step, "__func__", None)


def remember_updates(step: Any, found: StepUpdates) -> None:
    """Store the updates of a step on the step.

    Another run may call the same compiled program without tracing it.
    """
    if not found.updated:
        return
    known = known_updates(step)
    if known is not None and known is not found:
        found.add_known(known)
    try:
        setattr(step, _KNOWN_UPDATES, (step, found))
    except (AttributeError, TypeError):  # a bound method, a frozen or slotted object
        with contextlib.suppress(TypeError):  # there are no weak references to it
            _remember_weakly(step, found)


def remember_varied(step: Any, found: StepUpdates) -> None:
    """Store that a later call of a step has made other compiled updates than its first call."""
    known = known_updates(step) or found
    known.has_varied = True
    remember_updates(step, known)


def _remember_weakly(step: Any, found: StepUpdates) -> None:
    owner, method = _object_and_method(step)
    key = id(owner), method
    reference = weakref.ref(owner, lambda _: _WEAKLY_KNOWN.pop(key, None))
    made = [
        (weakref.ref(update.hyperparameters), update.structure, update.is_traced)
        for update in found.made
    ]
    _WEAKLY_KNOWN[key] = _WeaklyKnown(reference, dataclasses.replace(found, made=[]), made)


def known_updates(step: Any) -> StepUpdates | None:
    # A decorator copies the step's attributes, hence the check.
    owner, found = getattr(step, _KNOWN_UPDATES, (None, None))
    return found if owner is step else _weakly_known(step)


def _weakly_known(step: Any) -> StepUpdates | None:
    owner, method = _object_and_method(step)
    known = _WEAKLY_KNOWN.get((id(owner), method))
    if known is None or known.owner() is not owner:
        return None
    made: list[MadeUpdate] = []
    for reference, structure, is_traced in known.made:
        hyperparameters = reference()
        if hyperparameters is None:
            # The optimizer was made within a call and is gone: it is not known which updates
            # another call makes.
            return dataclasses.replace(known.found, has_varied=True)
        made.append(MadeUpdate(hyperparameters, structure, is_traced))
    return dataclasses.replace(known.found, made=made)


def known_compiled(step: Any, structure: Any) -> list[MadeUpdate]:
    """Return the updates of a state that each call of a step is known to make.

    There are none if its calls differ.
    """
    known = known_updates(step)
    if known is None or known.has_varied:
        return []
    return known.made_to(structure)


def warn_of_unfrozen(
    name: str, first: int, earlier: Collection[StepUpdates], stage: StepUpdates
) -> None:
    """Warn if a stage trains leaves that no earlier one did, with the age of trained leaves."""
    trained: set[str] = set()
    counting_labels: set[str | None] = set()
    for other in earlier:
        trained |= other.updated
        for path in other.updated:
            if path in other.age_of:
                counting_labels.add(other.age_of[path])
    unfrozen: list[str] = []
    for path in sorted(stage.updated - trained):
        if path in stage.age_of and stage.age_of[path] in counting_labels:
            unfrozen.append(path)
    if not unfrozen or not processes.is_process_0():
        return
    log_once(
        logging.WARNING,
        f"from step {first} on, {name} trains {format_list(list(map(repr, unfrozen)))} for the "
        "first time, with an age that has counted the updates of other parameters: an optimizer "
        "that corrects a bias by it, as Adam does, makes their first updates too large. Give them "
        "a label of their own in a jstep.partition, whose age begins with its first update",
    )
