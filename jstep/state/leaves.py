"""One pass over the leaves of a state, for checkpoints, fingerprints and checks."""

import functools
from collections.abc import Mapping, Set
from typing import Any

import jax

from jstep.core import selection, trees
from jstep.slots.roles import Role, roles_in
from jstep.state.sharding import MODEL_STATE, is_model_state
from jstep.state.slots import owners
from jstep.state.train_state import TrainState

GLOBAL_STEP = "global_step"
PARAMS = "params"
SLOTS = "slots"
FROZEN = "frozen"
"""The `leave_out` of a Saver for the parameters that the optimizer trains under no label."""

Keys = tuple[str, ...]


def _states_in(tree: trees.Tree) -> list[TrainState]:
    """Return the states in a tree, also those in a model state, such as DiLoCo's workers."""
    states: list[TrainState] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, TrainState)):
        if isinstance(node, TrainState):
            states.append(node)
            if isinstance(node.slots, Mapping):
                states += _states_in(node.slots.get(MODEL_STATE))
    return states


class _Structure:
    """The index, keys and path of each leaf, which depend on the structure of a tree alone."""

    def __init__(self, treedef: Any) -> None:
        self.indices = treedef.unflatten(range(treedef.num_leaves))
        self.keys: list[Keys] = []
        names: dict[Any, str] = {}
        for entries, _ in jax.tree_util.tree_flatten_with_path(self.indices)[0]:
            keys = []
            for entry in entries:
                typed = entry, type(getattr(entry, "key", None))  # 1 equals True
                if typed not in names:
                    names[typed] = trees.path_str((entry,))
                keys.append(names[typed])
            self.keys.append(tuple(keys))
        self.paths = ["/".join(keys) for keys in self.keys]

    @functools.cached_property
    def halves(self) -> dict[int, int]:
        halves: dict[int, int] = {}

        def add(params: Any, first: Any, second: Any) -> None:
            # A state made by hand may lack one of them, or have another tree there.
            if not (trees.is_like(params, first) and trees.is_like(params, second)):
                return
            first_indices = trees.flatten_like(params, first, SLOTS)
            second_indices = trees.flatten_like(params, second, SLOTS)
            for i, half in zip(first_indices, second_indices, strict=True):
                if i is not None and half is not None:
                    halves[i] = half

        for state in _states_in(self.indices):
            roles = roles_in(state)
            for name, half in roles.halves.items():
                add(state.params, state.slots.get(name), state.slots.get(half))
            for name in roles.names_with(Role.REMAINDER):
                if name not in roles.halves.values():  # of the parameters
                    add(state.params, state.params, state.slots.get(name))
        return halves


_structure_of = functools.lru_cache(maxsize=8)(_Structure)


class StateLeaves:
    """The leaves of a tree, flattened once, and their positions in the states of the tree."""

    def __init__(self, tree: trees.Tree) -> None:
        self.values, treedef = trees.flatten(tree)
        self.tree = tree
        try:
            self._structure = _structure_of(treedef)
        except TypeError:  # a node whose static part has no hash
            self._structure = _Structure(treedef)
        self.keys = self._structure.keys
        self.paths = self._structure.paths

    @property
    def indices(self) -> Any:
        return self._structure.indices

    @functools.cached_property
    def states(self) -> list[tuple[TrainState, TrainState]]:
        """Each state in the tree, with its copy that holds indices."""
        return list(zip(_states_in(self.tree), _states_in(self.indices), strict=True))

    @functools.cached_property
    def halves(self) -> dict[int, int]:
        """Index of a leaf that `compact` stores in two arrays → index of the other array."""
        return self._structure.halves

    def left_out(self, leave_out: selection.VarList) -> set[int]:
        """Return the indices of the left-out parameters and of their slots."""
        if leave_out is None:
            return set()
        params = field_of(self.tree, PARAMS)
        if params is None:
            raise ValueError(
                "leave_out: selects among the params of a state, but this "
                f"{type(self.tree).__name__} has none; save a TrainState, or a dict with 'params'"
            )
        if isinstance(leave_out, str) and leave_out == FROZEN:
            frozen = _frozen_in(self.tree)
            chosen = [i in frozen for i in range(len(jax.tree.leaves(params)))]
        else:
            chosen = selection.resolve(params, leave_out, "leave_out")
        param_indices = jax.tree.leaves(field_of(self.indices, PARAMS))
        left_out = {i for i, is_chosen in zip(param_indices, chosen, strict=True) if is_chosen}
        slots = field_of(self.tree, SLOTS)
        if not isinstance(slots, Mapping):
            return left_out
        slot_indices = field_of(self.indices, SLOTS)
        for name, tree in slots.items():
            parameters = owners(str(name), tree, params, roles_in(self.tree))
            for i, parameter in zip(jax.tree.leaves(slot_indices[name]), parameters, strict=True):
                if parameter is not None and chosen[parameter]:
                    left_out.add(i)
        return left_out


def _frozen_in(state: trees.Tree) -> Set[int]:
    roles = roles_in(state)
    is_created = isinstance(state, TrainState)
    if is_created and not roles:
        # If its optimizer has no slots, a state by `TrainState.create` has no roles.
        is_created = all(map(is_model_state, state.slots))
    if not is_created:
        raise ValueError(
            f"leave_out={FROZEN!r}: the state must come from TrainState.create, "
            "which notes what its optimizer freezes, got one made by hand; "
            "give the paths, such as leave_out='base/*'"
        )
    return roles.frozen


def field_of(state: trees.Tree, name: str) -> Any:
    if isinstance(state, Mapping):
        return state.get(name)
    return getattr(state, name, None)
