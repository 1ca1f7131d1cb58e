"""Matching of the leaves of a target to the leaves of a checkpoint, and the values of leaves without a match."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint import leaf_records, targets
from jstep.checkpoint.manifest import Leaf, LeftOutLeaf, Manifest
from jstep.core import trees
from jstep.core.checks import array_type
from jstep.core.placement import is_of_host, on_devices
from jstep.core.trees import Tree
from jstep.slots import compact_numbers
from jstep.slots.roles import COPIES, Role, Roles, roles_in
from jstep.state.leaves import GLOBAL_STEP, PARAMS, SLOTS, Keys, StateLeaves
from jstep.state.sharding import MODEL_STATE
from jstep.state.slots import owners

Names = Mapping[str, str] | Callable[[str], str | None]
"""Path in the target → path in the checkpoint; leaves that are not mentioned (None) have the same path in both."""
_FORM = "a mapping from paths of the target to paths in the checkpoint, or a function (path) -> path or None"
_NO_KIND = (
    "pass an array or a shape for each leaf, such as jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))"
)
_Kind = tuple[tuple[int, ...], str]
_OTHER_PATHS = (
    "Saver.restore(target, partial=True) restores what fits, and names={…} maps leaves that have another path"
)
_OTHER_PARAMS = (
    "names={…} maps leaves that have another path, and jstep.load_weights(path, target_params, partial=True) loads "
    "what fits"
)
_OTHER_FORMAT = (
    "slots are stored in another format, with or without jstep.compact, or in other blocks: restore a target of the "
    "optimizer that saved them, then state = jstep.repack(state, old_optimizer, new_optimizer)"
)
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)


class LeafCopy(NamedTuple):
    """How a leaf that the checkpoint lacks starts as a copy; `original` and `half` are indices of target leaves.

    Attributes:
        original: The leaf to copy.
        half: The leaf with the other half of the original, if `compact` stores it in two.
        part: Which half of the copy the leaf is; None for all.
    """

    original: int
    half: int | None
    part: int | None


class FreshAge(NamedTuple):
    """How an age starts whose slots are new: with as many updates as the slots of the target have had.

    Attributes:
        step: The index of the leaf with the step of the state; None if the age is a number of updates itself, as in
            the states of Optax.
        target_step, target_start: The values of the target: their difference is the number of updates.
    """

    step: int | None
    target_step: Any
    target_start: Any


@dataclasses.dataclass(frozen=True)
class WantedLeaf(targets.TargetLeaf[Leaf | None]):
    """A leaf of a target, and the saved leaf to restore into it.

    Attributes:
        is_guard: Whether it belongs to a guard that the saved state did not have.
        is_draw: Whether it counts draws, and the state was saved before they were counted.
        left_out: Set if the checkpoint leaves the leaf out: the target's value is used.
        half: The other half of the source, if the leaf is the value of both.
        fresh_age: Set if the leaf is an age, and no leaf that it counts for was restored: the source is not used.
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
    def is_restored(self) -> bool:
        return self.source is not None and self.fresh_age is None

    @property
    def is_missing(self) -> bool:
        return super().is_missing and not self.is_guard and not self.is_draw and self.left_out is None


@dataclasses.dataclass(frozen=True)
class CheckpointMatch(targets.TargetMatch[WantedLeaf]):
    """A match of a target and a checkpoint.

    Attributes:
        in_other_format: Whether only one of them has slots that `compact` stores in halves, or their blocks differ.
    """

    in_other_format: bool

    TITLES = "missing in the checkpoint", "extra in the checkpoint", "differing"


def match(
    target: Tree, manifest: Manifest, averages: Sequence[str] | None, names: Names | None, checkpoint: str
) -> CheckpointMatch:
    """Find the saved leaf of each leaf of a target; `averages` name slots that replace params."""
    leaves_of_target = StateLeaves(target)
    matcher = _LeafMatcher(leaves_of_target, roles_in(target), manifest, averages or (), names, checkpoint)
    leaves = [matcher.match_leaf(i) for i in range(len(leaves_of_target.paths))]
    if any(leaf.source is None for leaf in leaves):
        for i, copy in _plan_copies(leaves_of_target, leaves).items():
            leaves[i] = dataclasses.replace(leaves[i], copy=copy)
        for age in _ages(leaves_of_target):
            _match_age(age, leaves, matcher.renamed)
    return CheckpointMatch(leaves, matcher.unused(), matcher.in_other_format)


class _LeafMatcher:
    """Finds the saved leaf of each leaf of a target, given as indices.

    Attributes:
        renamed: Path in the target → path in the checkpoint, where `names` has another one.
        in_other_format: Whether a leaf has been found that only one side stores in halves, or in other blocks.
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
        # Leaves whose arrays the checkpoint has, and these with the ones that it leaves out.
        self._records = leaf_records.named_records(manifest.leaves)
        self._saved: dict[str, Leaf | LeftOutLeaf] = {**leaf_records.named_records(manifest.left_out), **self._records}
        self.renamed = _renamed(names, target.paths, self._saved.keys(), checkpoint)
        self._names = leaf_records.unique(target.paths)
        self._kinds = [targets.target_kind(*pair, _NO_KIND) for pair in zip(target.values, target.paths, strict=True)]
        self._shape_of_steps: Sequence[int] = ()
        for keys, kind in zip(target.keys, self._kinds, strict=True):
            if keys == (GLOBAL_STEP,):
                self._shape_of_steps = kind[0]
        # The names in the checkpoint that leaves have, whether or not it has them; those of parameters that an
        # average replaces are among them, as nobody misses these.
        self._used: set[str] = set()
        self.in_other_format = False

    def match_leaf(self, i: int) -> WantedLeaf:
        keys = self._target.keys[i]
        name = self.renamed.get(self._names[i], self._names[i])
        self._used.add(name)
        record = self._records.get(name)
        if self._has_roles and record is not None and (record.half is not None or i in self._target.halves):
            # One side stores it in halves, or both do.
            if self._kind_of_half(i) != self._kind_of_saved_half(record):
                self.in_other_format = True
        if self.renamed or self._averages:
            average = self._find_average(i, name)
            if average is not None:
                return self._wanted_leaf(i, name, source=average, half=self._arrays.get(average.half or ""))
        source = self._saved.get(name)
        # Of a scalar slot, such as an age; a slot with an array for each parameter has longer keys.
        role = self._roles.get(keys[1]) if len(keys) == 2 and keys[0] == SLOTS else None
        if source is None:
            return self._wanted_leaf(i, name, is_guard=role in _GUARDS, is_draw=role is Role.DRAWN)
        shape, dtype = self._kinds[i]
        problem = _difference(self._target.paths[i], keys, (shape, str(dtype)), source, self._shape_of_steps, role)
        if problem:
            return self._wanted_leaf(i, name, problem=problem)
        if isinstance(source, LeftOutLeaf):
            return self._wanted_leaf(i, name, left_out=source)
        return self._wanted_leaf(i, name, source=source)

    def _wanted_leaf(self, i: int, name: str, source: Leaf | None = None, **fields: Any) -> WantedLeaf:
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
        """Return the average that is restored in place of a parameter, if the checkpoint has one that fits."""
        shape, dtype = self._kinds[i]
        if self._names[i] in self.renamed:
            # What `names` says of a leaf is more than what `use_averages` says of all.
            average = _named_average(self._target.keys[i], dtype, self._records.get(name))
        else:
            average = find_average(name, self._records, self._averages)
        return None if average is None or average.shape != shape else average

    def _kind_of_half(self, i: int) -> _Kind | None:
        """Return shape and dtype of the other half of a leaf of the target; None if it is not stored in halves."""
        half = self._target.halves.get(i)
        if half is None:
            return None
        shape, dtype = self._kinds[half]
        return shape, str(dtype)

    def _kind_of_saved_half(self, record: Leaf) -> _Kind | None:
        half = self._arrays.get(record.half or "")
        return None if half is None else (half.shape, half.dtype)

    def unused(self) -> list[str]:
        """Return the names of saved leaves that no leaf of the target has, after all have been matched."""
        # A parameter that `names` replaces by its average is no more left over than one that `use_averages` replaces.
        replaced = {path for path, name in self.renamed.items() if path != name}
        unused = [name for name in self._records if name not in self._used and name not in replaced]
        if self._averages:
            # Averages are restored into any target, for evaluation.
            return [name for name in unused if not name.startswith(f"{SLOTS}/")]
        return unused


def _named_average(keys: Keys, dtype: Any, source: Leaf | None) -> Leaf | None:
    """Return a slot that `names` gives to a parameter: it is cast, and decoded, as `use_averages` does."""
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
        restored = [j for j in originals if leaves[j].source is not None]
        if leaves[i].source is not None or not restored:
            continue
        original = restored[0]
        if i not in halves:
            copies[i] = LeafCopy(original, halves.get(original), None)
            continue
        for part, index in enumerate((i, halves[i])):
            copies[index] = LeafCopy(original, halves.get(original), part)
    return copies


def _originals_of_copies(target: StateLeaves) -> dict[int, list[int]]:
    """Return the slots that start as copies → their originals in order of preference, as indices.

    A slot inside `master_weights` starts as a copy of the master, or if the checkpoint has none, of the parameter.
    """
    originals: dict[int, list[int]] = {}
    for state, indices in target.states:
        params = jax.tree.leaves(indices.params)
        roles = roles_in(state)
        copies: list[tuple[Role | None, int, int]] = []
        for name in roles.of(*COPIES):
            if name not in state.slots:
                continue
            owners_of_leaves = owners(name, state.slots[name], state.params, roles)
            for owner, index in zip(owners_of_leaves, jax.tree.leaves(indices.slots[name]), strict=True):
                if owner is not None:
                    copies.append((roles[name], owner, index))
        masters = {owner: index for role, owner, index in copies if role is Role.MASTER}
        for role, owner, index in copies:
            if role is Role.MASTER_COPY and owner in masters:
                originals[index] = [masters[owner], params[owner]]
            else:
                originals[index] = [params[owner]]
    return originals


class _Age(NamedTuple):
    """The leaf of an age, the step of its state, and the leaves that it counts for, as indices of leaves."""

    leaf: int
    step: int | None
    counted: list[int]


def _ages(target: StateLeaves) -> list[_Age]:
    ages: list[_Age] = []
    for state, indices in target.states:
        counted: dict[str, list[int]] = {}
        for age, slot, keys in roles_in(state).counted:
            if age in indices.slots and slot in indices.slots:
                of_slot = jax.tree_util.tree_leaves_with_path(indices.slots[slot])
                counted.setdefault(age, []).extend(i for path, i in of_slot if keys in (None, path))
        step_of_state: Any = indices.global_step
        if step_of_state is None:
            continue
        for age, of_age in counted.items():
            step = step_of_state if roles_in(state).get(age) is Role.AGE else None
            ages.append(_Age(indices.slots[age], step, of_age))
    return ages


def _match_age(age: _Age, leaves: list[WantedLeaf], renamed: Mapping[str, str]) -> None:
    """Start an age anew if no leaf that it counts for was restored; otherwise note which of these are new."""
    leaf = leaves[age.leaf]
    new = [i for i in age.counted if leaves[i].source is None]
    if len(new) < len(age.counted):
        for i in new:
            leaves[i] = dataclasses.replace(leaves[i], shares_age=True)
        return
    if leaf.path in renamed or (not age.counted and leaf.source is not None):
        return
    fresh = FreshAge(age.step, None if age.step is None else leaves[age.step].leaf, leaf.leaf)
    leaves[age.leaf] = dataclasses.replace(leaf, fresh_age=fresh)


def _difference(
    path: str, keys: Keys, wanted: _Kind, source: Leaf | LeftOutLeaf, steps: Sequence[int], role: Role | None
) -> str:
    saved = source.shape, source.dtype
    if saved == wanted:
        return ""
    # A held hyperparameter is a float64 if and only if 64-bit types are on.
    is_held = role is Role.HELD and saved[0] == wanted[0] and {saved[1], wanted[1]} == {"float32", "float64"}
    if isinstance(source, Leaf) and (is_held or _is_converted(keys, saved, wanted, steps)):
        return ""
    left_out = "left out as " if isinstance(source, LeftOutLeaf) else ""
    return f"{path!r} ({left_out}{array_type(*saved)}, and {array_type(*wanted)} in target)"


def _is_converted(keys: Keys, saved: _Kind, wanted: _Kind, steps: Sequence[int]) -> bool:
    """Return whether a leaf is a step count, which may convert between 32 and 64 bits.

    In a population, step counts have the shape `steps`.
    """
    if saved[0] != wanted[0] or {saved[1], wanted[1]} != leaf_records.COUNT_DTYPES or PARAMS in keys:
        return False
    return keys[-1] == GLOBAL_STEP or (keys[0] == SLOTS and saved[0] in ((), tuple(steps)))


def check(result: CheckpointMatch, partial: bool, checkpoint: str, *, params_only: bool = False) -> None:
    """Reject a match from which a state cannot be restored; if `partial`, leaves that do not fit are skipped."""
    differences = result.differences()
    if result.in_other_format or (differences and not partial):
        advice = _OTHER_PARAMS if params_only else _OTHER_PATHS
        if result.in_other_format:
            advice = _OTHER_FORMAT
        raise ValueError(f"target does not fit {checkpoint}{differences}. Nothing was restored; {advice}.")
    if result.wanted and all(want.source is None and want.left_out is None for want in result.wanted):
        advice = "names={…} maps leaves that have another path"
        raise ValueError(
            f"target has nothing in common with {checkpoint}{differences}. Nothing was restored; {advice}."
        )
    if any(want.path == GLOBAL_STEP and want.source is None for want in result.wanted):
        raise ValueError(
            f"partial=True: {checkpoint} has no global_step that fits{differences}; a trained state whose step starts "
            "at 0 would repeat its schedule and its data. Pass a target without a step, such as {'params': params}."
        )


def check_run(state: Tree, manifest: Manifest, checkpoint: str) -> None:
    """Like `check`, for resuming a run; the error says whose checkpoint it is."""
    result = match(state, manifest, None, None, checkpoint)
    try:
        check(result, False, checkpoint)
    except ValueError as error:
        unmatched = [want.path for want in result.wanted if want.is_missing or want.problem]
        differ = {_part(path) for path in (*unmatched, *result.unused)} & {PARAMS, SLOTS, MODEL_STATE}
        if result.in_other_format or not differ:
            raise
        raise ValueError(
            f"checkpoint_dir: {checkpoint.rpartition('/')[2]} was saved by a run with another "
            f"{'optimizer' if differ == {SLOTS} else 'model'}: its {' and '.join(sorted(differ))} differ from those of "
            f"state; give a new run another checkpoint_dir, see docs: help/errors#another-run. In detail, {error}"
        ) from None


def _part(path: str) -> str:
    top, *below = path.split("/")
    return MODEL_STATE if top == SLOTS and below[:1] == [MODEL_STATE] else top


def _renamed(names: Names | None, paths: Sequence[str], saved: Collection[str], checkpoint: str) -> dict[str, str]:
    """Return path in the target → path in the checkpoint, for paths that differ."""
    renamed = targets.names_by_path(names, paths, "target", _FORM)
    if not isinstance(names, Mapping):
        renamed = {path: other for path, other in renamed.items() if other is not None}
    renamed = {path: _saved_path(other, saved) for path, other in renamed.items()}
    for path, other in renamed.items():
        # A function that returns a path unchanged does not imply that the checkpoint has it.
        if other not in saved and (other != path or isinstance(names, Mapping)):
            raise ValueError(
                f"names: {path!r} should be restored from {other!r}, which {checkpoint} does not have"
                + trees.suggest_names(str(other), sorted(saved))
            )
    return renamed


def _saved_path(name: str, saved: Collection[str]) -> str:
    """Return a path in the checkpoint.

    TF's name of a slot, `w/ExponentialMovingAverage`, has the parameter first, and neither scopes nor labels.
    """
    if name in saved:
        return name
    parts = str(name).split("/")
    reversed_names = ["/".join([*parts[i:], *parts[:i]]) for i in range(1, len(parts))] or [name]
    for path in (f"{SLOTS}/{reversed_name}" for reversed_name in reversed_names):
        if path in saved:
            return path
    ends = tuple(f"/{reversed_name}" for reversed_name in reversed_names)
    found = [path for path in saved if path.startswith(f"{SLOTS}/") and path.endswith(ends)]
    # Not for a name of one part: a parameter without its "params/" would become a slot's value silently.
    return found[0] if len(found) == 1 and len(parts) > 1 else name


def find_average(name: str, saved: Mapping[str, Leaf], averages: Sequence[str]) -> Leaf | None:
    part = next((part for part in (PARAMS, f"{SLOTS}/{MODEL_STATE}") if f"{name}/".startswith(f"{part}/")), None)
    if part is None:
        return None
    of_slot = name.removeprefix(PARAMS) if part == PARAMS else f"/{name.removeprefix(f'{SLOTS}/')}"
    found = {f"{SLOTS}/{slot}{of_slot}" for slot in averages} & saved.keys()
    if len(found) > 1:
        raise ValueError(
            f"use_averages={list(averages)}: several of these slots have an average of {name!r}; give one of them"
        )
    return next((saved[path] for path in found), None)


def check_averages(averages: Sequence[str], saved: Sequence[Leaf], checkpoint: str) -> None:
    for slot in averages:
        if not any(f"{leaf.path}/".startswith(f"{SLOTS}/{slot}/") for leaf in saved):
            slots = sorted({leaf.keys[1] for leaf in saved if leaf.keys[0] == SLOTS and len(leaf.keys) > 1})
            raise ValueError(
                f"use_averages: {checkpoint} has no slot {slot!r}{trees.suggest_names(slot, slots)}; it has {slots}. "
                "If one of these has the averages, name it, as in use_averages='ema'; "
                "jstep.with_moving_average(optimizer, ema) keeps averages."
            )


# The values of leaves that have no source, and of all leaves without a target.


def nest_values(leaves: Sequence[Leaf], arrays: Mapping[str, Any], averages: Sequence[str] | None) -> dict[str, Any]:
    """Return nested dicts of NumPy arrays, with `averages`, if given, in place of params."""
    records = leaf_records.named_records(leaves)
    stored = {leaf.array: leaf for leaf in leaves}
    nested: dict[str, Any] = {}
    for name, record in records.items():
        value = leaf_records.leaf_value(record, None, arrays)
        average = find_average(name, records, averages) if averages else None
        if average is not None:
            half = stored.get(average.half or "")
            value = leaf_records.leaf_value(average, half, arrays).astype(value.dtype)
        group = nested
        for key in record.keys[:-1]:
            group = group.setdefault(key, {})
        group[record.keys[-1]] = value
    return nested


def copy_leaf(wanted: WantedLeaf, values: Sequence[Any]) -> Any:
    assert wanted.copy is not None
    _, half, part = wanted.copy
    original = values[wanted.copy.original]
    sharding = wanted.sharding
    if half is not None or part is not None:
        low = None if half is None else on_devices(jnp.asarray(values[half]))
        original = compact_numbers.decode_leaf(on_devices(jnp.asarray(original)), low)
    if part is not None:
        original = compact_numbers.split_halves(original.astype(jnp.float32))[part]
    if wanted.is_numpy or not isinstance(original, jax.Array):
        return targets.place_leaf(wanted, np.asarray(original))
    array = on_devices(original)
    is_there = sharding is not None and not is_of_host(sharding) and sharding.device_set == array.sharding.device_set
    cast = jax.jit(lambda x: jnp.array(x, wanted.dtype, copy=True), out_shardings=sharding if is_there else None)
    return cast(array) if is_there or sharding is None else jax.device_put(cast(array), sharding)


def start_age(wanted: WantedLeaf, values: Sequence[Any]) -> Any:
    """Return the `start_step` of new slots: the restored step, less the updates that the target's slots have had."""
    assert wanted.fresh_age is not None
    index, target_step, target_start = wanted.fresh_age
    if index is None:
        return keep_target_leaf(wanted, 0)
    step = values[index]
    if not (targets.has_value(target_step) and targets.has_value(target_start)):
        # The other slots are copies of what was restored, so that a target of shapes will do: these have no updates.
        target_step = target_start = np.zeros(wanted.shape, wanted.dtype)
    if isinstance(step, jax.Array) and not step.is_fully_addressable:  # of a population, on several processes
        start = step - (jnp.asarray(target_step) - jnp.asarray(target_start)).astype(step.dtype)
        return jax.device_put(start.astype(wanted.dtype), wanted.sharding)
    updates = np.asarray(target_step) - np.asarray(target_start)
    return targets.place_leaf(wanted, np.asarray(np.asarray(step) - updates, wanted.dtype))


def keep_target_leaf(wanted: WantedLeaf, step: int) -> Any:
    """Return a copy of a leaf that nothing is restored into; a guard's step becomes the checkpoint's.

    Draws begin at 0, whatever the target has: no update of the checkpoint's step was made yet.
    """
    leaf = wanted.leaf
    if wanted.is_draw:
        return targets.place_leaf(wanted, np.zeros(np.shape(leaf), wanted.dtype))
    if wanted.is_guard and jnp.issubdtype(wanted.dtype, jnp.integer):
        return targets.place_leaf(wanted, np.full(np.shape(leaf), step, wanted.dtype))
    targets.check_value(wanted)
    return leaf.copy() if trees.is_array(leaf) else jnp.asarray(leaf, wanted.dtype)
