"""A statement has one thought: none has three conditions, comprehensions, lambdas or named values.

This is not a budget. Two of them in one statement may be good or bad, as a review decides; of
three, no good example was found. Statements that contain others, such as `if` and `for`, count with
their heads alone.
"""

import ast
from collections.abc import Iterator

import pytest
from source_files import MODULES, tree_of

DENSE = (
    ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr,
)  # fmt: skip
BODIES = {"body", "orelse", "finalbody", "handlers", "cases", "decorator_list"}
"""The fields of a statement that are statements of their own, or about the whole of a function."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of the statements in its body."""
    for field, value in ast.iter_fields(statement):
        if field in BODIES:
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield from ast.walk(node)


def is_dense(statement: ast.stmt) -> bool:
    """Return whether a statement has three parts that a reader must hold in the head together.

    A chain of `and` and `or` is one such part if it has more than three operators, and three if it
    has five.
    """
    parts = 0
    operators = 0
    for node in own_nodes(statement):
        if isinstance(node, DENSE):
            parts += 1
        elif isinstance(node, ast.BoolOp):
            operators += len(node.values) - 1
    if operators >= 5:
        return True
    if operators >= 3:
        parts += 1
    return parts >= 3


def dense_statements(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the dense statements below a node, each with the qualified name of the function or
    class that it is in."""
    for child in ast.iter_child_nodes(node):
        name = f"{owner}.{child.name}" if isinstance(child, DEFINITIONS) else owner
        if isinstance(child, ast.stmt) and not isinstance(child, DEFINITIONS) and is_dense(child):
            yield owner, child
        yield from dense_statements(child, name)


def test_a_statement_has_one_thought() -> None:
    found = []
    for module, path in MODULES.items():
        for owner, statement in dense_statements(tree_of(path), module):
            found.append(f"{owner} (line {statement.lineno}): {ast.unparse(statement)[:100]}")
    assert not found, "write a loop, early returns, or a value of its own for each thought"


@pytest.mark.parametrize(
    "code",
    [
        "x = a if b else c if d else e if f else g",
        "x = [a if b else c for a in d if any(e for e in a)]",
        "x = f(lambda: [y for y in z], lambda: 0)",
        "if (x := f()) and any(y for y in x) and (z := g()): pass",
        "x = [y for y in z if y] if a and b and c and d else None",
        "x = a and b and c or d and e or f",
        "def f():\n    return [[[c for c in b] for b in a] for a in x]",
        "class A:\n    def f(self):\n        for x in (y if a else b if c else d for y in z): pass",
    ],
)
def test_dense_statements_are_found(code: str) -> None:
    assert len(list(dense_statements(ast.parse(code), "m"))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "x = [a if b else c for a in d]",
        "x = a if b and c and d else e",
        "for x in [y for y in z]:\n    a = x if b else c\n    d = x if e else f",
        "x = a and b and c and d",
        "def f(a=lambda: 0, b=lambda: 1, c=lambda: 2):\n    pass",
    ],
)
def test_other_statements_are_allowed(code: str) -> None:
    assert not list(dense_statements(ast.parse(code), "m"))
