"""Names of values are nouns: a reader can search for `own_shards`, but not for `own`. Conditions
are an `if`."""

import ast
import functools
from collections.abc import Iterable, Set

import pytest
from source_files import MODULES, nodes_of, text_of

NOT_NOUNS = {
    "own", "there", "mine", "of", "each", "held", "its", "one", "now", "then", "more", "rest",
}  # fmt: skip


def vague_names(node: ast.AST) -> list[str]:
    """Return the name that a node gives to a value, a parameter or a field if it is not a noun."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = [node.id]
    else:
        names = [node.arg] if isinstance(node, ast.arg) else []
    return [name for name in names if name in NOT_NOUNS]


def keys_of_files(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Return the fields of TypedDicts: they are keys of files that exist."""
    kinds = [
        node
        for node in nodes
        if isinstance(node, ast.ClassDef) and "TypedDict" in map(ast.unparse, node.bases)
    ]
    return {
        field.target for kind in kinds for field in kind.body if isinstance(field, ast.AnnAssign)
    }


def test_names_of_values_are_nouns() -> None:
    found = []
    for module, path in MODULES.items():
        nodes = nodes_of(path)
        keys = keys_of_files(nodes)
        for node in nodes:
            for name in vague_names(node) if node not in keys else ():
                line = text_of(path).splitlines()[node.lineno - 1].strip()
                found.append(f"{module}:{node.lineno} {name}: {line}")
    assert not found, "name the value after what it is (CONTRIBUTING, Glossary)"


def test_vague_names_are_found() -> None:
    tree = ast.parse(
        "def f(own, *rest, **more):\n    for each, x in its:\n"
        "        now: int = each\n    return now\n"
    )
    assert sorted(name for node in ast.walk(tree) for name in vague_names(node)) == [
        "each",
        "more",
        "now",
        "own",
        "rest",
    ]


# A condition is an `if`, not a factor, and a comprehension has one.

TRUTHS = {"all", "any", "bool", "callable", "hasattr", "isinstance"}
"""Functions that return a bool."""
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def bools_of(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Return the names of parameters and fields that are annotated `bool`."""
    found = set()
    for node in nodes:
        if (
            isinstance(node, ast.arg | ast.AnnAssign)
            and ast.unparse(node.annotation or ast.Constant(0)) == "bool"
        ):
            found.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    return frozenset(found)


@functools.cache
def fields() -> frozenset[str]:
    return frozenset().union(*(bools_of(nodes_of(path)) for path in MODULES.values()))


def is_truth(node: ast.AST, bools: Set[str]) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(is_truth(value, bools) for value in node.values)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in TRUTHS
    if isinstance(node, ast.Name):
        return node.id in bools or node.id.startswith(("is_", "has_"))
    if isinstance(node, ast.Attribute):
        return node.attr in fields() or node.attr.lstrip("_").startswith(("is_", "has_"))
    return isinstance(node, ast.Compare) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def hides_condition(node: ast.AST, bools: Set[str]) -> bool:
    """Return whether a node multiplies by a bool, or is a comprehension with several conditions.

    One condition that names a value, `if (x := f(y)) is not None`, is fine.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return is_truth(node.left, bools) or is_truth(node.right, bools)
    if not isinstance(node, COMPREHENSIONS):
        return False
    conditions = sum(len(generator.ifs) for generator in node.generators)
    evaluated_once = set(ast.walk(node.generators[0].iter))
    inner = [other for other in ast.walk(node) if other not in evaluated_once]
    has_name = any(isinstance(other, ast.NamedExpr) for other in inner)
    others = sum(isinstance(other, ast.IfExp | ast.BoolOp) for other in inner)
    return conditions > 1 or (has_name and conditions + others > 1)


def test_conditions_are_written_as_such() -> None:
    found = list[str]()
    for module, path in MODULES.items():
        nodes = nodes_of(path)
        bools = bools_of(nodes)
        found += [
            f"{module}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if hides_condition(node, bools)
        ]
    assert not found, "write an `if`"


@pytest.mark.parametrize(
    "code",
    [
        "[text] * (count > 1)",
        "'s' * (not is_one)",
        "f'{x}' * bool(y)",
        "' or None' * optional",
        "' weak' * leaf.is_weak",
        "3 * (a is None and b)",
        "[x for x in y if x if x > 1]",
        "[x for x in y if x for z in x if z]",
        "{key: value for key in keys if key in seen and (value := f(key))}",
        "[(z := f(x)) if x else None for x in y if x]",
    ],
)
def test_hidden_conditions_are_found(code: str) -> None:
    assert any(hides_condition(node, {"optional"}) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "[0] * count",
        "n * (rows or 0)",
        "[z for x in y or [] if (z := f(x)) is not None]",
        "[x for x in y if x and z]",
    ],
)
def test_other_forms_are_allowed(code: str) -> None:
    assert not any(hides_condition(node, {"optional"}) for node in ast.walk(ast.parse(code)))
