"""Names of values are nouns: a reader can search for `own_shards`, but not for `own`."""

import ast
import collections

from source_files import MODULES, nodes_of, text_of

NOT_NOUNS = {"own", "there", "mine", "of", "each", "held", "its", "one", "now", "then", "more", "rest"}

MOST = {"loop": 14, "record": 1}
"""The number of such names in each package, which may only fall."""


def vague_names(node: ast.AST) -> list[str]:
    """Return the name that a node gives to a value, a parameter or a field if it is not a noun."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = [node.id]
    else:
        names = [node.arg] if isinstance(node, ast.arg) else []
    return [name for name in names if name in NOT_NOUNS]


def test_names_of_values_are_nouns() -> None:
    found = collections.defaultdict(list)
    for module, path in MODULES.items():
        for node in nodes_of(path):
            for name in vague_names(node):
                line = text_of(path).splitlines()[node.lineno - 1].strip()
                found[module.split(".")[0]].append(f"{module}:{node.lineno} {name}: {line}")
    more_than_before = {package: places for package, places in found.items() if len(places) > MOST.get(package, 0)}
    assert not more_than_before, "name the value after what it is (CONTRIBUTING, Glossary)"


def test_vague_names_are_found() -> None:
    tree = ast.parse("def f(own, *rest, **more):\n    for each, x in its:\n        now: int = each\n    return now\n")
    assert sorted(name for node in ast.walk(tree) for name in vague_names(node)) == [
        "each",
        "more",
        "now",
        "own",
        "rest",
    ]
