"""Matching of a target's leaves to those of a checkpoint, and the values of unmatched leaves."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.array_store import leaf_records
from jstep.array_store.manifest import Leaf, LeftOutLeaf, Manifest
from jstep.checkpoint import targets
from jstep.core import trees
from jstep.core.checks import array_type
from jstep.core.path_matching import match_paths, names_by_path
from jstep.core.placement import is_of_host, move_to_devices
from jstep.core.trees import Tree
from jstep.slots import compact_numbers
from jstep.slots.roles import COPIES, Role, Roles, roles_in
from jstep.state.leaves import GLOBAL_STEP, PARAMS, SLOTS, Keys, StateLeaves
from jstep.state.sharding import MODEL_STATE
from jstep.state.slots import choose_average, owners

Names = Mapping[str, str] | Callable[[str], str | None]
"""Path in the target → path in the checkpoint; leaves that are not mentioned (None) have the same
path in both."""
_FORM = (
    "a mapping from paths of the target to paths in the checkpoint, or a function "
    "(path) -> path or None"
)
_KIND_ADVICE = (
    "pass an array or a shape for each leaf, such as jax.eval_shape(lambda: "
    "jstep.TrainState.create(params, optimizer))"
)
_Kind = tuple[tuple[int, ...], str]
_OTHER_PATHS = (
    "Saver.restore(target, partial=True) restores what fits, and names={…} maps leaves "
    "that have another path"
)
_OTHER_PARAMS = (
    "names={…} maps leaves that have another path, and jstep.load_weights(path, target_params, "
    "partial=True) loads what fits"
)
_OTHER_FORMAT = (
    "slots are stored in another format, with or without jstep.compact, or in other blocks: "
    "restore a target of the optimizer that saved them, then state = jstep.repack(state, "
    "old_optimizer, new_optimizer)"
)
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)


class LeafCopy(NamedTuple):
    """How a leaf that the checkpoint lacks starts as a copy.

    `original` and `half` are indices of target leaves.

    Attributes:
        original: The leaf to copy.
        half: The leaf with the other half of the original, if `compact` stores it in two.
        half_index: Which half of the copy the leaf is, 0 or 1; None for all.
    """

    original: int
    half: int | None
    half_index: int | None


class FreshAge(NamedTuple):
    """The start of an age whose slots are all new: they count as many updates as in the target.

    Attributes:
        step: The index of the leaf with the step of the state; None if the age is itself a number
            of updates, as in the states of Optax.
        target_step: The step of the target.
        target_start: The age of the target, which had `target_step - target_start` updates.
    """

    step: int | None
    target_step: Any
    target_start: Any


@dataclasses.dataclass(frozen=True)
class WantedLeaf(targets.TargetLeaf[Leaf | None]):
    """A leaf of a target, and the saved leaf to restore into it.

    The first of `fresh_age`, `source` (with `half`, if set) and `copy` that is set gives its value.
    If none is, it comes from the target: see `keep_target_leaf`.

    Attributes:
        is_guard: Whether it belongs to a guard that the saved state did not have.
        is_draw: Whether it counts draws, and the state was saved before they were counted.
        left_out: Set if the checkpoint leaves the leaf out: the target's value is used.
        half: The other half of the source, if the leaf is the value of both.
        fresh_age: Set if the leaf is an age, and no leaf that it counts for was restored.
        shares_age: Whether the leaf is new, and its age counts for restored leaves, too.
    """

    keys: Keys = ()
    is_guard: bool = False
    is_draw: bool = False
    left_out: LeftOutLeaf | None = None
    copy: LeafCopy | None = None
    half: Leaf | None = None
    fresh_age: FreshAge | None = None
    shares_age: bool = False

    @property
    def is_unmatched(self) -> bool:
        """Whether the checkpoint should have it, and has none that fits."""
        if self.is_guard or self.is_draw or self.left_out is not None:
            return False
        return self.source is None

    @property
    def is_missing(self) -> bool:
        return super().is_missing and self.is_unmatched


@dataclasses.dataclass(frozen=True)
class CheckpointMatch(targets.TargetMatch[WantedLeaf]):
    """A match of a target and a checkpoint.

    Attributes:
        has_other_format: Whether only one of them has slots that `compact` stores in halves, or
            their blocks differ.
    """

    has_other_format: bool

    TITLES = "missing in the checkpoint", "extra in the checkpoint", "differing"


def match(
    target: Tree,
    manifest: Manifest,
    averages: Sequence[str] | None,
    names: Names | None,
    checkpoint: str,
) -> CheckpointMatch:
    """Find the saved leaf of each leaf of a target; `averages` name slots that replace params."""
    target_leaves = StateLeaves(target)
    matcher = _LeafMatcher(
        target_leaves, roles_in(target), manifest, averages or (), names, checkpoint
    )
    leaves = [matcher.match_leaf(i) for i in range(len(target_leaves.paths))]
    if any(leaf.source is None for leaf in leaves):
        for i, copy in _plan_copies(target_leaves, leaves).items():
            leaves[i] = dataclasses.replace(leaves[i], copy=copy)
        for age in _ages(target_leaves):
            _match_age(age, leaves, matcher.renamed)
    return CheckpointMatch(leaves, matcher.unused(), matcher.has_other_format)


class _LeafMatcher:
    """Finds the saved leaf of each leaf of a target, given as indices.

    Attributes:
        renamed: Path in the target → path in the checkpoint, where `names` has another one.
        has_other_format: Whether a leaf has been found that only one side stores in halves, or in
            other blocks.
    """

    def __init__(
        self,
        target: StateLeaves,
        roles: Roles,
        manifest: Manifest,
        averages: Sequence[str],
        names: Names | None,
        checkpoint: str,
    ) -> None:
        self._target = target
        self._roles = roles
        self._has_roles = bool(roles)
        self._averages = averages
        self._arrays = manifest.leaves_by_array
        # Leaves whose arrays the checkpoint has; and below, these with the ones that it leaves out.
        self._records = leaf_records.named_records(manifest.leaves)
        saved: dict[str, Leaf | LeftOutLeaf] = {
            **leaf_records.named_records(manifest.left_out),
            **self._records,
        }
        self.renamed = _renamed(names, target.paths, saved.keys(), checkpoint)
        # The names of the leaves in the target, and in the checkpoint. A parameter that
        # `use_averages` restores from its average has its own name in both, so that the saved
        # parameter does not count as unused.
        self._target_names = leaf_records.unique(target.paths)
        self._saved_names = [self.renamed.get(name, name) for name in self._target_names]
        self._matched = match_paths(self._saved_names, saved)
        self._kinds = [
            targets.target_kind(value, path, _KIND_ADVICE)
            for value, path in zip(target.values, target.paths, strict=True)
        ]
        self._step_shape: Sequence[int] = ()
        for keys, kind in zip(target.keys, self._kinds, strict=True):
            if keys == (GLOBAL_STEP,):
                self._step_shape = kind[0]
        self.has_other_format = False

    def match_leaf(self, i: int) -> WantedLeaf:
        keys = self._target.keys[i]
        name = self._saved_names[i]
        source = self._matched.found[i]
        # Without roles, nothing says which leaves of the target are halves.
        if self._has_roles and isinstance(source, Leaf):
            is_in_halves = source.half is not None or i in self._target.halves
            if is_in_halves and self._do_halves_differ(i, source):
                self.has_other_format = True
        if self.renamed or self._averages:
            average = self._find_average(i, name)
            if average is not None:
                return self._wanted_leaf(
                    i, name, source=average, half=leaf_records.other_half(average, self._arrays)
                )
        # The role of a scalar slot, such as an age; a slot with an array for each parameter has
        # longer keys.
        role = self._roles.get(keys[1]) if len(keys) == 2 and keys[0] == SLOTS else None
        if source is None:
            return self._wanted_leaf(i, name, is_guard=role in _GUARDS, is_draw=role is Role.DRAWN)
        shape, dtype = self._kinds[i]
        problem = _difference(
            source,
            path=self._target.paths[i],
            keys=keys,
            wanted=(shape, str(dtype)),
            step_shape=self._step_shape,
            role=role,
        )
        if problem:
            return self._wanted_leaf(i, name, problem=problem)
        if isinstance(source, LeftOutLeaf):
            return self._wanted_leaf(i, name, left_out=source)
        return self._wanted_leaf(i, name, source=source)

    def _wanted_leaf(
        self, i: int, name: str, source: Leaf | None = None, **fields: Any
    ) -> WantedLeaf:
        value = self._target.values[i]
        shape, dtype = targets.kind_of_data(value, self._kinds[i])
        return WantedLeaf(
            path=self._target.paths[i],
            leaf=value,
            shape=shape,
            dtype=dtype,
            name=name,
            source=source,
            keys=self._target.keys[i],
            **fields,
        )

    def _find_average(self, i: int, name: str) -> Leaf | None:
        """Return the average that replaces a parameter, if the checkpoint has one that fits."""
        shape, dtype = self._kinds[i]
        if self._target_names[i] in self.renamed:
            # `names`, which names this leaf, counts more than `use_averages`, which is for all.
            average = _average_by_names(self._target.keys[i], dtype, self._records.get(name))
        else:
            average = find_average(name, self._records, self._averages)
        if average is None or average.shape != shape:
            return None
        return average

    def _do_halves_differ(self, i: int, record: Leaf) -> bool:
        """Return whether only one side stores a leaf in halves, or both do, in other blocks."""
        half = self._target.halves.get(i)
        saved_half = leaf_records.other_half(record, self._arrays)
        if half is None or saved_half is None:
            return half is not None or saved_half is not None
        shape, dtype = self._kinds[half]
        return (shape, str(dtype)) != (saved_half.shape, saved_half.dtype)

    def unused(self) -> list[str]:
        """Return the names of saved leaves that no target leaf has, after all have been matched."""
        # A parameter that `names` replaces by its average counts as used, like one that
        # `use_averages` replaces.
        replaced = {path for path, name in self.renamed.items() if path != name}
        unused = [
            name for name in self._matched.unused if name in self._records and name not in replaced
        ]
        if self._averages:
            # Averages are restored into any target, for evaluation.
            return [name for name in unused if not name.startswith(f"{SLOTS}/")]
        return unused


def _average_by_names(keys: Keys, dtype: Any, source: Leaf | None) -> Leaf | None:
    """Return the source of a leaf if `names` restores a parameter from a slot with numbers.

    Such a slot is cast and decoded as an average of `use_averages` is. None for any other source.
    """
    if source is None or source.keys[0] != SLOTS or keys[0] != PARAMS:
        return None
    if source.key_impl is not None or not trees.is_floating(dtype):
        return None
    return source if trees.is_floating(jnp.dtype(source.dtype)) else None


def _plan_copies(target: StateLeaves, leaves: Sequence[WantedLeaf]) -> dict[int, LeafCopy]:
    """Return the leaves that the checkpoint lacks → the restored leaves that they copy."""
    copies: dict[int, LeafCopy] = {}
    halves = target.halves
    for i, originals in _originals_of_copies(target).items():
        if leaves[i].source is not None:
            continue
        original = next((j for j in originals if leaves[j].source is not None), None)
        if original is None:
            continue
        if i not in halves:
            copies[i] = LeafCopy(original, halves.get(original), None)
            continue
        for half_index, index in enumerate((i, halves[i])):
            copies[index] = LeafCopy(original, halves.get(original), half_index)
    return copies


class _CopiedLeaf(NamedTuple):
    """A leaf of a slot that starts as a copy of a parameter, or of its master.

    Attributes:
        role: The role of the slot.
        owner: The index of the parameter, among the parameters.
        leaf: The index of the leaf, among those of the target.
    """

    role: Role | None
    owner: int
    leaf: int


def _originals_of_copies(target: StateLeaves) -> dict[int, list[int]]:
    """Return the slots that start as copies → their originals in order of preference, as indices.

    A slot inside `master_weights` starts as a copy of the master, or if the checkpoint has none, of
    the parameter. With `lookahead` there, the slow weights have the originals
    `[master, parameter]`, and the master has `[parameter]`.
    """
    originals: dict[int, list[int]] = {}
    for state, indices in target.states:
        params = jax.tree.leaves(indices.params)
        roles = roles_in(state)
        copies: list[_CopiedLeaf] = []
        for name in roles.names_with(*COPIES):
            if name not in state.slots:
                continue
            owners_of_leaves = owners(name, state.slots[name], state.params, roles)
            for owner, index in zip(
                owners_of_leaves, jax.tree.leaves(indices.slots[name]), strict=True
            ):
                if owner is not None:
                    copies.append(_CopiedLeaf(roles[name], owner, index))
        masters = {copy.owner: copy.leaf for copy in copies if copy.role is Role.MASTER}
        for copy in copies:
            parameter = params[copy.owner]
            if copy.role is Role.MASTER_COPY and copy.owner in masters:
                originals[copy.leaf] = [masters[copy.owner], parameter]
            else:
                originals[copy.leaf] = [parameter]
    return originals


class _Age(NamedTuple):
    """An age, as indices of leaves.

    Attributes:
        leaf: The leaf of the age.
        step: The leaf with the step of its state; None if the age is a number of updates itself.
        counted: The leaves of the slots that it counts for.
    """

    leaf: int
    step: int | None
    counted: list[int]


def _ages(target: StateLeaves) -> list[_Age]:
    ages: list[_Age] = []
    for state, indices in target.states:
        step_of_state: Any = indices.global_step
        if step_of_state is None:
            continue
        roles = roles_in(state)
        leaves_by_age: dict[str, list[int]] = {}
        for age, slot, keys in roles.counted:
            if age not in indices.slots or slot not in indices.slots:
                continue
            counted = leaves_by_age.setdefault(age, [])
            for path, i in jax.tree_util.tree_leaves_with_path(indices.slots[slot]):
                # Without keys, it counts for the whole slot.
                if keys is None or keys == path:
                    counted.append(i)
        for age, counted in leaves_by_age.items():
            step = step_of_state if roles.get(age) is Role.AGE else None
            ages.append(_Age(indices.slots[age], step, counted))
    return ages


def _match_age(age: _Age, leaves: list[WantedLeaf], renamed: Mapping[str, str]) -> None:
    """Start an age anew if no leaf that it counts for was restored; otherwise note the new ones."""
    leaf = leaves[age.leaf]
    new = [i for i in age.counted if leaves[i].source is None]
    if len(new) < len(age.counted):
        for i in new:
            leaves[i] = dataclasses.replace(leaves[i], shares_age=True)
        return
    if leaf.path in renamed:
        return  # the user says which age it is
    if not age.counted and leaf.source is not None:
        return  # it counts for no leaf, and is as old as the checkpoint says
    target_step = None if age.step is None else leaves[age.step].leaf
    leaves[age.leaf] = dataclasses.replace(
        leaf, fresh_age=FreshAge(age.step, target_step, leaf.leaf)
    )


def _difference(
    source: Leaf | LeftOutLeaf,
    *,
    path: str,
    keys: Keys,
    wanted: _Kind,
    step_shape: Sequence[int],
    role: Role | None,
) -> str:
    """Describe how a saved leaf differs from the wanted one; empty if it can be restored."""
    saved = source.shape, source.dtype
    if saved == wanted:
        return ""
    if isinstance(source, Leaf) and _is_converted(keys, saved, wanted, step_shape, role):
        return ""
    left_out = "left out as " if isinstance(source, LeftOutLeaf) else ""
    return f"{path!r} ({left_out}{array_type(*saved)}, and {array_type(*wanted)} in target)"


def _is_converted(
    keys: Keys, saved: _Kind, wanted: _Kind, step_shape: Sequence[int], role: Role | None
) -> bool:
    """Return whether a leaf was saved with 32 bits and is wanted with 64, or vice versa.

    Only step counts and held hyperparameters are converted.

    Args:
        step_shape: The shape of the global step: in a population, that of the slots' counts, too.
    """
    shape, dtype = saved
    wanted_shape, wanted_dtype = wanted
    if shape != wanted_shape:
        return False
    dtypes = {dtype, wanted_dtype}
    if role is Role.HELD and dtypes == {"float32", "float64"}:
        # A held hyperparameter is a float64 if and only if 64-bit types are on.
        return True
    if dtypes != leaf_records.COUNT_DTYPES or PARAMS in keys:
        return False
    if keys[-1] == GLOBAL_STEP:
        return True
    return keys[0] == SLOTS and shape in ((), tuple(step_shape))


def check(
    result: CheckpointMatch, partial: bool, checkpoint: str, *, params_only: bool = False
) -> None:
    """Reject a match from which no state can be restored; `partial` skips leaves that differ."""
    differences = result.differences()
    advice = ""
    if result.has_other_format:
        advice = _OTHER_FORMAT
    elif differences and not partial:
        advice = _OTHER_PARAMS if params_only else _OTHER_PATHS
    if advice:
        raise ValueError(
            f"target does not fit {checkpoint}{differences}. Nothing was restored; {advice}."
        )
    is_empty = all(want.source is None and want.left_out is None for want in result.wanted)
    if result.wanted and is_empty:
        advice = "names={…} maps leaves that have another path"
        raise ValueError(
            f"target has nothing in common with {checkpoint}{differences}. Nothing was "
            f"restored; {advice}."
        )
    if any(want.path == GLOBAL_STEP and want.source is None for want in result.wanted):
        raise ValueError(
            f"partial=True: {checkpoint} has no global_step that fits{differences}; a trained "
            "state whose step starts at 0 would repeat its schedule and its data. Pass a target "
            "without a step, such as {'params': params}."
        )


def check_run(state: Tree, manifest: Manifest, checkpoint: str) -> None:
    """Like `check`, for resuming a run; the error says whose checkpoint it is."""
    result = match(state, manifest, None, None, checkpoint)
    try:
        check(result, partial=False, checkpoint=checkpoint)
    except ValueError as error:
        unmatched = [want.path for want in result.wanted if want.is_missing or want.problem]
        parts = {_part_of_state(path) for path in (*unmatched, *result.unused)}
        differing = parts & {PARAMS, SLOTS, MODEL_STATE}
        if result.has_other_format or not differing:
            raise
        raise ValueError(
            f"checkpoint_dir: {checkpoint.rpartition('/')[2]} was saved by a run with another "
            f"{'optimizer' if differing == {SLOTS} else 'model'}: its "
            f"{' and '.join(sorted(differing))} differ from those of state; give a new run another "
            f"checkpoint_dir, see docs: help/errors#another-run. In detail, {error}"
        ) from None


def _part_of_state(path: str) -> str:
    """Return the part of a state that a path is in; the model state is one of its slots."""
    if f"{path}/".startswith(f"{SLOTS}/{MODEL_STATE}/"):
        return MODEL_STATE
    return path.partition("/")[0]


def _renamed(
    names: Names | None, paths: Sequence[str], saved: Collection[str], checkpoint: str
) -> dict[str, str]:
    """Return path in the target → path in the checkpoint, for paths that differ."""
    is_mapping = isinstance(names, Mapping)
    renamed: dict[str, str] = {}
    for path, given in names_by_path(names, paths, "target", _FORM).items():
        if given is None and not is_mapping:
            continue  # the function does not mention it
        other = _saved_path(given, saved)
        # A function that returns a path unchanged does not imply that the checkpoint has it.
        if other not in saved and (other != path or is_mapping):
            suggestion = trees.suggest_names(str(other), sorted(saved))
            raise ValueError(
                f"names: {path!r} should be restored from {other!r}, which {checkpoint} does not "
                f"have{suggestion}"
            )
        renamed[path] = other
    return renamed


def _saved_path(name: str, saved: Collection[str]) -> str:
    """Return the path in the checkpoint of what `names` gives; the name itself if there is none.

    The name may be TF's of a slot, such as `w/ExponentialMovingAverage`: the parameter comes first,
    and the scopes and labels before the slot are missing.
    """
    if name in saved:
        return name
    parts = str(name).split("/")
    if len(parts) == 1:
        # The name of a whole slot; not a parameter without its "params/", which would become a
        # slot's value silently.
        return f"{SLOTS}/{name}" if f"{SLOTS}/{name}" in saved else name
    # A parameter's path may have several parts: each division of the name into two is tried.
    swapped_names = ["/".join([*parts[i:], *parts[:i]]) for i in range(1, len(parts))]
    for swapped in swapped_names:
        if f"{SLOTS}/{swapped}" in saved:
            return f"{SLOTS}/{swapped}"
    ends = tuple(f"/{swapped}" for swapped in swapped_names)
    found = [path for path in saved if path.startswith(f"{SLOTS}/") and path.endswith(ends)]
    return found[0] if len(found) == 1 else name


def find_average(name: str, saved: Mapping[str, Leaf], averages: Sequence[str]) -> Leaf | None:
    """Return the average of a parameter or model state leaf in one of some slots, or None.

    Slots have the averages of parameters at the paths of these, and those of the model state below
    its name.
    """
    if f"{name}/".startswith(f"{PARAMS}/"):
        path_in_slot = name.removeprefix(PARAMS)
    elif f"{name}/".startswith(f"{SLOTS}/{MODEL_STATE}/"):
        path_in_slot = name.removeprefix(SLOTS)
    else:
        return None
    found = {f"{SLOTS}/{slot}{path_in_slot}" for slot in averages} & saved.keys()
    if len(found) > 1:
        raise ValueError(
            f"use_averages={list(averages)}: several of these slots have an average of "
            f"{name!r}; give one of them"
        )
    return next((saved[path] for path in found), None)


def full_names(averages: Sequence[str], manifest: Manifest, checkpoint: str) -> list[str]:
    """Return the full names of the slots that `use_averages` names.

    Raises:
        ValueError: A name is not that of one average; or of a slot, if the checkpoint does not note
            what is an average.
    """
    full = list(averages)
    if manifest.averages is not None:
        full = [
            choose_average(name, manifest.averages, "use_averages", checkpoint) for name in averages
        ]
    for slot in full:
        if not any(f"{leaf.path}/".startswith(f"{SLOTS}/{slot}/") for leaf in manifest.leaves):
            keys_of_slots = [leaf.keys for leaf in manifest.leaves if leaf.keys[0] == SLOTS]
            slots = sorted({keys[1] for keys in keys_of_slots if len(keys) > 1})
            raise ValueError(
                f"use_averages: {checkpoint} has no slot "
                f"{slot!r}{trees.suggest_names(slot, slots)}; it has {slots}. If one of these has "
                "the averages, name it, as in use_averages='ema'; "
                "jstep.with_moving_average(optimizer, ema) keeps averages."
            )
    return full


# The values of leaves that have no source, and of all leaves without a target.


def nest_values(
    leaves: Sequence[Leaf], arrays: Mapping[str, Any], averages: Sequence[str] | None
) -> dict[str, Any]:
    """Return nested dicts of NumPy arrays, with `averages`, if given, in place of params."""
    records = leaf_records.named_records(leaves)
    stored = {leaf.array: leaf for leaf in leaves}
    nested: dict[str, Any] = {}
    for name, record in records.items():
        value = leaf_records.leaf_value(record, None, arrays)
        average = find_average(name, records, averages) if averages else None
        if average is not None:
            half = leaf_records.other_half(average, stored)
            value = leaf_records.leaf_value(average, half, arrays).astype(value.dtype)
        group = nested
        for key in record.keys[:-1]:
            group = group.setdefault(key, {})
        group[record.keys[-1]] = value
    return nested


def copy_leaf(wanted: WantedLeaf, values: Sequence[Any]) -> Any:
    """Return a leaf as a copy of restored values, with its own dtype and sharding."""
    assert wanted.copy is not None
    half = wanted.copy.half
    half_index = wanted.copy.half_index
    original = values[wanted.copy.original]
    # Halves are joined before the copy, and split again if the copy has halves, too.
    if half is not None or half_index is not None:
        low = None if half is None else move_to_devices(jnp.asarray(values[half]))
        original = compact_numbers.decode_leaf(move_to_devices(jnp.asarray(original)), low)
    if half_index is not None:
        original = compact_numbers.split_halves(original.astype(jnp.float32))[half_index]
    if wanted.is_numpy or not isinstance(original, jax.Array):
        return targets.place_leaf(wanted, np.asarray(original))
    array = move_to_devices(original)
    sharding = wanted.sharding
    # The program runs on the devices of the original. If the copy is wanted there, the program also
    # places it.
    is_on_devices = sharding is not None and not is_of_host(sharding)
    can_place = is_on_devices and sharding.device_set == array.sharding.device_set
    cast = jax.jit(
        lambda x: jnp.array(x, wanted.dtype, copy=True),
        out_shardings=sharding if can_place else None,
    )
    if can_place or sharding is None:
        return cast(array)
    return jax.device_put(cast(array), sharding)


def start_age(wanted: WantedLeaf, values: Sequence[Any]) -> Any:
    """Return the `start_step` of new slots: the restored step less the target slots' updates."""
    assert wanted.fresh_age is not None
    index, target_step, target_start = wanted.fresh_age
    if index is None:
        return keep_target_leaf(wanted, 0)
    step = values[index]
    if not (targets.has_value(target_step) and targets.has_value(target_start)):
        # A target of shapes has had no updates.
        target_step = np.zeros(wanted.shape, wanted.dtype)
        target_start = target_step
    if isinstance(step, jax.Array) and not step.is_fully_addressable:
        # The steps of a population on several processes, none of which has them all.
        start = step - (jnp.asarray(target_step) - jnp.asarray(target_start)).astype(step.dtype)
        return jax.device_put(start.astype(wanted.dtype), wanted.sharding)
    updates = np.asarray(target_step) - np.asarray(target_start)
    return targets.place_leaf(wanted, np.asarray(np.asarray(step) - updates, wanted.dtype))


def keep_target_leaf(wanted: WantedLeaf, step: int) -> Any:
    """Return a copy of a leaf into which nothing is restored; a guard's step is the checkpoint's.

    Draws begin at 0, whatever the target has: they number the updates of one step, and the
    checkpoint's step has had none yet.
    """
    leaf = wanted.leaf
    if wanted.is_draw:
        return targets.place_leaf(wanted, np.zeros(np.shape(leaf), wanted.dtype))
    if wanted.is_guard and jnp.issubdtype(wanted.dtype, jnp.integer):
        return targets.place_leaf(wanted, np.full(np.shape(leaf), step, wanted.dtype))
    targets.check_has_value(wanted)
    return leaf.copy() if trees.is_array(leaf) else jnp.asarray(leaf, wanted.dtype)
