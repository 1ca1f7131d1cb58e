"""Mutation testing: change single statements of jstep, and show the changes no test notices.

    .venv/bin/python dev/mutants.py 50                              # of the whole package
    .venv/bin/python dev/mutants.py 50 --seed 7 --night jstep/loop  # of one room, also by night

Each change is made in a copy of the tree: the tree itself is only read. Which tests reach a
statement is known from a map of coverage, for which the quick tests of each folder run once; it is
kept in `.pytest_cache/mutants`, and made again if that is removed. Processes that tests start are
not traced there, so the tests that start some run for each change of their room. A change is
noticed by day if a quick test fails, or by night if a thorough one of the same files does. Whoever
reads the survivors decides what each is: a hole in the tests, a line that is not needed, or a
change that no user could meet.
"""

import argparse
import ast
import contextlib
import copy
import difflib
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import changed

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "jstep"
PRELOADED = ("pytest", "numpy", "jax", "jax.numpy", "orbax.checkpoint")
LIMIT = 400
"""Tests that are run for one change, at most."""

WHO = DAY, NIGHT, NOBODY = "day", "night", "nobody"

# Changes of a statement.

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.USub: ast.UAdd,
}


class Mutant(NamedTuple):
    """A change of one expression or statement: the source between two offsets in bytes becomes
    `text`."""

    kind: str
    line: int
    begin: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """Return the changed source."""
        data = source.encode()
        return (data[: self.begin] + self.text.encode() + data[self.end :]).decode()


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that can be changed: neither definitions nor imports, docstrings, and
    messages of errors."""
    skipped = (
        ast.FunctionDef
        | ast.AsyncFunctionDef
        | ast.ClassDef
        | ast.Import
        | ast.ImportFrom
        | ast.Raise
        | ast.Pass
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, skipped):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_docstring and not (
                isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            ):
                yield node


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself: not those of its block, of annotations or of
    f-strings."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        for name, value in ast.iter_fields(waiting.pop()):
            for node in value if isinstance(value, list) else [value]:
                is_other = isinstance(node, ast.stmt | ast.JoinedStr | ast.ExceptHandler)
                if name == "annotation" or is_other:
                    continue
                if isinstance(node, ast.expr):
                    yield node
                if isinstance(node, ast.AST):
                    waiting.append(node)


def _changed(node: Any) -> Iterator[tuple[str, ast.expr | str]]:
    """Yield the changes of an expression, by kind."""

    def having(**fields: Any) -> Any:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "comparison", having(ops=[*node.ops[:i], _OTHER[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _OTHER:
        yield "operator", having(op=_OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "operator", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield (
            "value",
            ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1),
        )
    elif isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            yield "argument", having(keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])
        if len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args):
            yield "argument", having(args=node.args[:-1])
            yield "neighbor", having(args=[node.args[1], node.args[0], *node.args[2:]])
    elif isinstance(node, ast.IfExp):
        yield "condition", having(body=node.orelse, orelse=node.body)
    elif (
        isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        and node.generators[0].ifs
    ):
        first, *others = node.generators
        negated = [ast.UnaryOp(ast.Not(), first.ifs[0]), *first.ifs[1:]]
        generators = [ast.comprehension(first.target, first.iter, negated, first.is_async), *others]
        yield "condition", having(generators=generators)


def mutants(source: str) -> dict[ast.stmt, list[Mutant]]:
    """Return the changes of each statement of a module."""
    begins = [0]
    for line in source.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def mutant(kind: str, node: Any, text: str) -> Mutant:
        begin, end = (
            begins[node.lineno - 1] + node.col_offset,
            begins[node.end_lineno - 1] + node.end_col_offset,
        )
        return Mutant(kind, statement.lineno, begin, end, text)

    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(one) for function in functions for one in ast.walk(function)}
    found: dict[ast.stmt, list[Mutant]] = {}
    for statement in statements(tree):
        ways = []
        if isinstance(statement, ast.If | ast.While | ast.Assert):
            ways.append(mutant("condition", statement.test, f"not ({ast.unparse(statement.test)})"))
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            ways.append(mutant("call", statement, "pass"))
        simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Return)
        if id(statement) in inside and simple and getattr(statement, "value", None) is not None:
            # It is not a bare `return`.
            ways.append(mutant("return", statement, "return None"))
        for node in _expressions(statement):
            ways += [mutant(kind, node, f"({ast.unparse(new)})") for kind, new in _changed(node)]
        if ways:
            found[statement] = ways
    return found


def drawn(sources: dict[str, str], count: int, seed: int) -> Iterator[tuple[str, Mutant]]:
    """Yield changes of different statements, drawn in proportion to the statements of each file."""
    rng = random.Random(seed)
    ways = [(path, found) for path, source in sources.items() for found in mutants(source).values()]
    rng.shuffle(ways)
    for path, found in ways:
        kind = rng.choice(sorted({one.kind for one in found}))
        chosen = rng.choice([one for one in found if one.kind == kind])
        if count and _differs(chosen, sources[path]):
            count -= 1
            yield path, chosen


def _differs(one: Mutant, source: str) -> bool:
    """Whether a change is one, and Python can read it."""
    try:
        return ast.dump(ast.parse(one.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


# The map: which tests reach a line. This file is also the plugin of pytest that makes it.


class Recorder:
    """A plugin of pytest that records the lines of the package that each test reaches, its time,
    and its outcome."""

    def __init__(self, folder: pathlib.Path, paths: list[str]) -> None:
        import coverage

        self.paths = paths
        self.path = folder / f"tests.{os.getpid()}.json"
        self.coverage = coverage.Coverage(
            str(folder / "lines"),
            data_suffix=True,
            source_pkgs=[PACKAGE],
            config_file=False,
            messages=False,
        )
        self.seconds: dict[str, float] = {}
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.coverage.stop()
        if exitstatus > 1:  # interrupted, or a usage error
            return
        self.coverage.save()
        found = {
            "paths": self.paths,
            "seconds": self.seconds,
            "flags": os.environ.get("XLA_FLAGS", ""),
        }
        self.path.write_text(json.dumps(found), encoding="utf-8")


def pytest_configure(config: Any) -> None:
    """Record if `dev/mutants.py` runs pytest to make its map."""
    if folder := os.environ.get("MUTANTS_MAP"):
        config.pluginmanager.register(Recorder(pathlib.Path(folder), config.args))


class CoverageMap:
    """The tests that passed, with their seconds, and those that reach a line of a file.

    Args:
        root: The tree, which may have changed since the map was made.
        folder: The map, with a copy of the tree as it was then.
        paths: Tests that are run and added unless they are known.
    """

    def __init__(self, root: pathlib.Path, folder: pathlib.Path, paths: set[str]) -> None:
        import coverage

        self._root, self._before = root, folder / "tree"
        if not self._before.exists():
            copied(root, self._before)
        self.seconds: dict[str, float] = {}
        known = [
            json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("tests.*.json")
        ]
        if missing := sorted(paths - {path for one in known for path in one["paths"]}):
            self._run(folder, [path for path in missing if (self._before / path).exists()])
        for path in sorted(folder.glob("tests.*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            self.seconds |= found["seconds"]
            # `conftest.py` would try them in another process.
            os.environ.setdefault("XLA_FLAGS", found["flags"])
        lines = coverage.Coverage(str(folder / "combined"), config_file=False, messages=False)
        lines.combine([str(path) for path in folder.glob("lines.*")], keep=True)
        lines.save()
        self._lines = lines.get_data()

    def _run(self, folder: pathlib.Path, paths: list[str]) -> None:
        """Run quick tests, and record what they reach."""
        command = [sys.executable, "-m", "pytest", "-p", "mutants", "-p", "no:xdist", *paths]
        # The others do not know which test runs.
        known = {"MUTANTS_MAP": str(folder), "COVERAGE_CORE": "ctrace"}
        known["PYTHONPATH"] = os.pathsep.join(
            [str(pathlib.Path(__file__).parent), str(self._before)]
        )
        subprocess.run(command, cwd=self._before, env=os.environ | known, check=False)

    def tests(self, path: str, line: int) -> list[str]:
        """Return the tests that reach a line, those of its room first, and then those that take the
        least time.

        For a line that runs when the module is imported, these are the tests of the file.
        """
        lines = self._lines.contexts_by_lineno(str(self._before / path))
        line = self._line_before(path, line)
        reached = set(lines.get(line, ())) - {""}
        if not reached and "" in lines.get(line, ()):
            reached = {test for tests in lines.values() for test in tests} - {""}
        room = f"tests/{path.split('/')[1]}/"
        of_room = [test for test in self.seconds if test.startswith(room)]
        reached |= {test for test in of_room if _starts_processes(self._root / test.split("::")[0])}
        known = [test for test in reached if test in self.seconds]
        return sorted(known, key=lambda test: (not test.startswith(room), self.seconds[test]))

    def _line_before(self, path: str, line: int) -> int:
        """Return the number of a line when the map was made; for a new line, that of the one before
        it."""
        trees = [tree / path for tree in (self._before, self._root)]
        before, now = (
            file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in trees
        )
        blocks = difflib.SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks()
        block = max(
            (block for block in blocks if block.b < line), key=lambda block: block.b, default=None
        )
        return line if block is None else min(block.a + line - block.b, block.a + block.size)


@functools.cache
def _starts_processes(path: pathlib.Path) -> bool:
    return bool(
        re.search(
            r"\b(subprocess|forked|killed|processes|children)\b", path.read_text(encoding="utf-8")
        )
    )


# Runs of pytest, in a copy of the tree.


def copied(root: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copy the tree, without what is built."""
    ignored = shutil.ignore_patterns(
        ".venv*", ".git", ".*_cache", "__pycache__", "site", "build", "dist", "runs"
    )
    shutil.copytree(root, target, ignore=ignored, symlinks=True)
    return target


def run_pytest(tree: str, arguments: list[str], log: str) -> None:
    """Run pytest in the copy, in a process of its own; the exit code is that of pytest."""
    os.setsid()  # its own group, so that the processes of tests end with it
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree  # for the processes that tests start
    sys.path[:] = [tree, *(one for one in sys.path if one != str(pathlib.Path(__file__).parent))]
    import pytest

    cache = f"cache_dir={pathlib.Path(log).parent / 'cache'}"
    code = pytest.main([*arguments, "-x", "-p", "no:xdist", "-o", cache])
    sys.stdout.flush()
    os._exit(code)


def noticed(context: Any, tree: pathlib.Path, arguments: list[str], limit: float) -> str | None:
    """Return the test that fails, "the time limit", or None if all pass.

    Raises:
        RuntimeError: pytest did not run the tests, which says nothing about a change.
    """
    log = tree.parent / "log"
    process = context.Process(target=run_pytest, args=(str(tree), arguments, str(log)))
    process.start()
    process.join(limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    timed_out = process.is_alive()
    process.join()
    if timed_out:
        return "the time limit"
    text = log.read_text(encoding="utf-8", errors="replace")
    if process.exitcode in (0, 5):  # 5: no test was collected
        return None
    if failed := re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE):
        return str(failed[0])
    if "conftest" in text or process.exitcode < 0:  # it breaks an import, or ends the process
        return (text.strip().splitlines() or [f"exit code {process.exitcode}"])[-1]
    # Doctests that a change has taken away.
    missing = re.findall(r"^ERROR: not found: (.+)$", text, re.MULTILINE)
    left = [one for one in arguments if not any(other.endswith(one) for other in missing)]
    if missing and len(left) < len(arguments):
        return noticed(context, tree, left, limit) if left else None
    raise RuntimeError(f"pytest exited with code {process.exitcode}: {text[-2000:]}")


class Draw:
    """Changes made and tested one after the other.

    Args:
        tree: The copy of the tree in which they are made.
        known: The map.
        night: Whether survivors are also tested by the thorough tests of the same files.
        seconds: The time of the tests for one change, as the map knows it; the limit is three times
            as long.
    """

    def __init__(
        self, tree: pathlib.Path, known: CoverageMap, *, night: bool, seconds: float
    ) -> None:
        self._tree, self._known, self._night, self._seconds = tree, known, night, seconds
        # Its processes have imported what takes long.
        self._context = multiprocessing.get_context("forkserver")
        self._limit = 60 + 3 * seconds

    def check(self, changes: list[tuple[str, Mutant]]) -> None:
        """Refuse tests that fail without a change: those of the first change that has some."""
        chosen = self._chosen(
            next(filter(None, (self._known.tests(path, one.line) for path, one in changes)), [])
        )
        if chosen and (by := noticed(self._context, self._tree, chosen, self._limit)):
            sys.exit(
                f"{by} fails without a change: repair it, "
                "or remove .pytest_cache/mutants to make a new map"
            )

    def _chosen(self, tests: list[str]) -> list[str]:
        """Return those of some tests that are run: the first ones, as time allows."""
        known = tests[:LIMIT]
        spent = itertools.accumulate(self._known.seconds[test] for test in known)
        return [
            test
            for i, (test, total) in enumerate(zip(known, spent, strict=True))
            if not i or total < self._seconds
        ]

    def run(self, path: str, change: Mutant) -> tuple[str, str]:
        """Return who notices a change, one of `WHO`, and the test that fails or what was run."""
        tests = self._known.tests(path, change.line)
        chosen = self._chosen(tests)
        if not chosen:
            return NOBODY, "no quick test reaches it"
        file = self._tree / path
        source = file.read_text(encoding="utf-8")
        file.write_text(change.applied(source), encoding="utf-8")
        try:
            if by := noticed(self._context, self._tree, chosen, self._limit):
                return DAY, by
            files = list(dict.fromkeys(test.split("::")[0] for test in chosen))
            if self._night and (
                by := noticed(
                    self._context, self._tree, ["-m", "thorough", *files], 10 * self._limit
                )
            ):
                return NIGHT, by
        finally:
            file.write_text(source, encoding="utf-8")
        return NOBODY, f"{len(chosen)} of {len(tests)} quick tests that reach it pass"


def diff(path: str, source: str, change: Mutant) -> str:
    """Return the change of a file as a diff."""
    lines = (text.splitlines(keepends=True) for text in (source, change.applied(source)))
    return "".join(difflib.unified_diff(*lines, path, path, n=2))


def modules(root: pathlib.Path, paths: list[str]) -> dict[str, str]:
    """Return the sources of the modules below some paths."""
    given = [root / path for path in paths or [PACKAGE]]
    files = [
        file
        for path in given
        for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))
    ]
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}


def main(
    arguments: list[str], root: pathlib.Path = ROOT, preloaded: Sequence[str] = PRELOADED
) -> int:
    """Draw changes, test them, and print the survivors; 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, help="number of changes")
    parser.add_argument("paths", nargs="*", help="files and folders of the package; all by default")
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn")
    parser.add_argument(
        "--night", action="store_true", help="test survivors by the thorough tests, too"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="time of the tests for one change"
    )
    options = parser.parse_intermixed_args(arguments)
    sources = modules(root, options.paths)
    changes = list(drawn(sources, options.count, options.seed))
    paths = set().union(*(changed.tests_of(path) for path, _ in changes))
    known = CoverageMap(root, root / ".pytest_cache" / "mutants", paths)
    results: dict[str, list[str]] = {who: [] for who in WHO}
    multiprocessing.set_forkserver_preload(list(preloaded))
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        tree = copied(root, pathlib.Path(temporary, "tree"))
        draw = Draw(tree, known, night=options.night, seconds=options.seconds)
        draw.check(changes)
        for path, change in changes:
            begin = time.monotonic()
            by, what = draw.run(path, change)
            title = f"{path}:{change.line} {change.kind}"
            print(f"{title:60} {by:7} {time.monotonic() - begin:4.0f} s  {what}", flush=True)
            results[by].append(f"{title}: {what}\n{diff(path, sources[path], change)}")
    print("\n" + "\n".join(results[NOBODY]))
    print(", ".join(f"noticed by {who}: {len(found)}" for who, found in results.items()))
    return 1 if results[NOBODY] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
