"""The mapping from leaves to tensors: the `names` argument."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jstep.core import paths, trees
from jstep.core.checks import kind, shown
from jstep.core.matching import entries
from jstep.core.notes import note

Transform = Callable[[Any], Any]
Entry = str | tuple[str, Transform] | None
Names = Mapping[str, Entry] | Callable[[str], Entry]
"""Path of a leaf → the name of its tensor, a pair of that and a function of the tensor, or None for no tensor."""

_FORM = "must be the name of a tensor, a pair (name, transform), or None"


class Rule(NamedTuple):
    """The tensor of a leaf.

    Attributes:
        name: The name of the tensor; None if the leaf has no tensor.
        transform: From the stored tensor to the leaf, or from the leaf to the tensor to store; None for the identity.
    """

    name: str | None
    transform: Transform | None = None


def rules(names: Any, tree: Any, what: str) -> list[Rule]:
    """Return the rule of each leaf of a tree, in JAX's order.

    Args:
        names: The user's argument.
        tree: The tree.
        what: The name of the tree's argument, for errors.

    Raises:
        TypeError: `names` has values other than names.
        ValueError: `names` has a path that is not in the tree, or two leaves share a path.
    """
    known = paths.names_of(tree)
    for path, count in Counter(found[0] for found in known).items():
        if count > 1:
            raise ValueError(paths.ambiguous(what, path, count))
    given = entries(
        names, known, what, f"a mapping from paths of {what} to names of tensors, or a function (path) -> name"
    )
    return [_rule(path, given[path]) if path in given else Rule(path) for path, *_ in known]


def _rule(path: str, entry: Any) -> Rule:
    if entry is None or isinstance(entry, str):
        return Rule(entry)
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and callable(entry[1]):
        return Rule(*entry)
    raise TypeError(f"names: for {path!r} it has {shown(entry)}: {_FORM}, got {kind(entry)}")


def transformed(transform: Transform, array: Any, path: str) -> Any:
    """Call a user's transform.

    Raises:
        TypeError: It did not return an array.
    """
    try:
        result = transform(array)
    except Exception as error:
        note(error, f"(in the transform of names for {path!r})")
        raise
    if not trees.is_array(result):
        raise TypeError(f"names: the transform for {path!r} returned {kind(result)}: must return an array")
    return result
