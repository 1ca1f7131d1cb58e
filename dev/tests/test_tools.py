"""The tools of the test suite: which tests are thorough, what they cost, which a change needs, and
what none sees."""

import ast
import json
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import changed
import costs
import mutants
import pytest
import soak
import thorough
from hypothesis import register_random


def cases(
    test: str, ids: list[str], parameters: list[dict[str, Any]], except_for: Any
) -> list[Any]:
    """Return stand-ins for the cases of a parametrized test with the marker."""
    mark = pytest.mark.thorough(except_for=except_for).mark
    return [
        types.SimpleNamespace(
            nodeid=f"{test}[{name}]",
            callspec=types.SimpleNamespace(id=name, params=values),
            own_markers=[mark],
        )
        for name, values in zip(ids, parameters, strict=True)
    ]


COMBINATIONS = [
    {"layout": layout, "dtype": dtype}
    for layout in ("data", "model", "fsdp")
    for dtype in ("f4", "f2")
]
IDS = [f"{one['layout']}-{one['dtype']}" for one in COMBINATIONS]


@pytest.mark.parametrize(
    ("except_for", "quick"),
    [
        (["model-f2"], ["model-f2"]),
        ({"layout": ["data"]}, ["data-f4", "data-f2"]),
        ({"layout": ["data"], "dtype": ["f4"]}, ["data-f4"]),
        ("each value once", ["data-f4", "model-f2", "fsdp-f4"]),
    ],
)
def test_exceptions_are_quick(except_for: Any, quick: list[str]) -> None:
    items = cases("test_a", IDS, COMBINATIONS, except_for)
    thorough.mark_cases(items)
    assert [item.callspec.id for item in items if not item.own_markers] == quick
    markers = [
        {mark.name for mark in item.own_markers} for item in items if item.callspec.id not in quick
    ]
    assert markers == [{"thorough", "repetition"}] * (len(items) - len(quick))


def test_cases_of_a_test_without_a_quick_one_are_not_repetitions() -> None:
    """With the lowest versions no case of such a test would run."""
    items = cases("test_a", IDS, COMBINATIONS, ["moved"])
    thorough.mark_cases(items)
    names = [[mark.name for mark in item.own_markers] for item in items]
    assert names == [["thorough"]] * len(items)


@pytest.mark.parametrize("except_for", [["moved"], IDS])
def test_exceptions_without_effect_are_errors(
    except_for: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thorough, "_is_default_run", True)
    with pytest.raises(ValueError, match=r"test_a: .* excepts (all|none) of its cases"):
        thorough.mark_cases(cases("test_a", IDS, COMBINATIONS, except_for))


@pytest.mark.parametrize(
    ("arguments", "expression", "selected", "is_default"),
    [
        (["tests"], "not thorough", "not thorough", True),
        (["tests/test_a.py::test_b[data]"], "not thorough", "", False),
        (["tests/test_a.py::test_b"], "thorough", "thorough", False),
        (["tests"], "", "", False),
    ],
)
def test_tests_that_are_named_run(
    arguments: list[str],
    expression: str,
    selected: str,
    is_default: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thorough, "_is_default_run", False)
    config: Any = types.SimpleNamespace(
        args=arguments, option=types.SimpleNamespace(markexpr=expression)
    )
    thorough.configure(config)
    assert (config.option.markexpr, thorough._is_default_run) == (selected, is_default)


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        (
            "jstep/checkpoint/saver.py",
            {"jstep/checkpoint/saver.py", "tests/checkpoint", "tests/object_storage"},
        ),
        (
            "jstep/stores/objects.py",
            {"jstep/stores/objects.py", "tests/stores", "tests/object_storage"},
        ),
        ("tests/planning/test_cost_command.py", {"tests/planning/test_cost_command.py"}),
        ("tests/sharding/conftest.py", {"tests/sharding"}),
        ("tests/hooks/refused_calls.txt", {"tests/hooks", "tests/bad_input"}),
        ("docs/how/resume.md", {"tests/docs"}),
        ("examples/digits.py", {"tests/examples"}),
    ],
)
def test_a_change_leads_to_its_tests(file: str, tests: set[str]) -> None:
    assert changed.tests_of(file) == tests


def test_a_changed_helper_leads_to_the_tests_that_use_it() -> None:
    assert "tests/object_storage" in changed.tests_of("tests/object_storage/fake_s3.py")
    wanted = changed.tests_of("tests/optimizer_entries/classic.py")
    both = {"tests/optimizers/test_contract_steps.py", "tests/sharding/test_sharded_training.py"}
    assert both <= wanted
    assert "tests/queues/test_queues.py" not in wanted


def test_any_two_paths_of_tests_can_be_collected_together() -> None:
    """pytest finds modules in the folder of a test and in those above it that have a conftest.py.

    One of another folder is found only if tests of that folder are collected, too; and `conftest`
    is any of several.
    """
    root = Path(__file__).parents[2] / "tests"
    files = list(root.rglob("*.py"))
    helpers = [path for path in files if not path.name.startswith(("test_", "conftest"))]
    folder_of = {path.stem: path.parent for path in helpers}
    assert len(folder_of) == len(helpers)
    for file in files:
        found = {
            file.parent,
            *(folder for folder in file.parents if (folder / "conftest.py").exists()),
        }
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        modules = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
        modules |= {
            node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
        }
        elsewhere = {
            name for name in modules if folder_of.get(name.split(".")[0], root) not in found
        }
        assert not elsewhere | modules & {"conftest"}, file


def test_files_inside_of_folders_are_not_listed() -> None:
    files = [
        "jstep/planning/cost_command.py",
        "tests/planning/test_cost_command.py",
        "tests/queues/test_queues.py",
        "jstep/cli/gone.py",
    ]
    assert changed.tests_of_all(files) == [
        "jstep/planning/cost_command.py",
        "tests/planning",
        "tests/queues/test_queues.py",
    ]


def test_a_warning_of_hypothesis_about_itself_is_ignored() -> None:
    generator = random.Random()
    # Hypothesis warns of an object that only this function refers to, as of its own with 3.14.
    register_random(generator)


def test_expensive_quick_tests_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {
        "tests/a/test_x.py::test_one": (0.5, 0.6, False),
        "tests/a/test_x.py::test_two": (9.0, 9.5, False),
        "tests/b/test_y.py::test_three": (9.0, 9.5, True),
    }
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(measured))
    assert costs.main(str(path)) == 1
    printed = capsys.readouterr().out
    assert "1 quick tests take more than" in printed
    assert "9.00  tests/a/test_x.py::test_two" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:4]}
    assert rows["tests/a"] == ["2", "9.5", "10.1", "0", "0.0", "0.0"]
    assert rows["all"][0] == "2"
    del measured["tests/a/test_x.py::test_two"]
    path.write_text(json.dumps(measured))
    assert costs.main(str(path)) == 0


# Mutation testing: which changes it makes, and who notices them.

SOURCE = '''
"""A module: its docstring stays."""
from typing import Any

TABLE: Any = {"é": (1, True)}


def work(x: int, y: int = 3) -> int | None:
    """A docstring stays, too."""
    if x < 10 and not y:
        log(x, y, level=2)
        x += 1
    z = [-one for one in range(x) if one % 2] if y else f(y, x)
    for one in z:
        raise ValueError(f"x={x + 1}: must be 2")
    return x * y
'''

PROJECT = {
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = \"-m 'not thorough'\"\n"
    'markers = ["thorough: by night"]\n',
    "jstep/__init__.py": "",
    "jstep/room/__init__.py": "",
    "jstep/room/work.py": "def seen(x):\n    return x + 1\n\n\n"
    "def at_night(x):\n    return x + 1\n\n\n"
    "def reached(x):\n    return x + 1\n\n\ndef unreached(x):\n    return x + 1\n",
    "tests/room/test_work.py": "import pytest\nfrom jstep.room import work\n\n\n"
    "def test_seen():\n    assert work.seen(1) == 2\n\n\n"
    "def test_reached():\n    assert work.at_night(1) != work.reached\n    work.reached(1)\n\n\n"
    "@pytest.mark.thorough\ndef test_at_night():\n    assert work.at_night(1) == 2\n",
}


def test_changes_of_each_kind() -> None:
    lines = {statement.lineno: ways for statement, ways in mutants.mutants(SOURCE).items()}
    assert sorted(lines) == [5, 10, 11, 12, 13, 16]  # neither docstrings nor messages of errors
    texts = {(one.kind, one.text) for ways in lines.values() for one in ways}
    assert texts >= {
        ("value", "(2)"),
        ("value", "(False)"),
        ("condition", "not (x < 10 and (not y))"),
        ("operator", "(x < 10 or not y)"),
        ("comparison", "(x <= 10)"),
        ("value", "(11)"),
        ("operator", "(y)"),
        ("call", "pass"),
        ("return", "return None"),
        ("argument", "(log(x, y))"),
        ("argument", "(log(x, level=2))"),
        ("neighbor", "(log(y, x, level=2))"),
        ("condition", "(f(y, x) if y else [-one for one in range(x) if one % 2])"),
        ("condition", "([-one for one in range(x) if not one % 2])"),
        ("operator", "(x / y)"),
    }
    for ways in lines.values():
        for one in ways:
            after = one.applied(SOURCE)
            ast.parse(after)
            begin, end = (
                len(SOURCE.encode()[: one.begin].decode()),
                len(SOURCE.encode()[one.end :].decode()),
            )
            assert after.startswith(SOURCE[:begin])
            assert after.endswith(SOURCE[len(SOURCE) - end :])


def test_a_seed_draws_the_same_changes_of_different_statements() -> None:
    first, again, other = (
        list(mutants.drawn({"a": SOURCE, "b": SOURCE}, 9, seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len({(path, one.line) for path, one in first}) == len(first) == 9


@pytest.mark.thorough
def test_who_notices_a_change(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    code = (
        "import pathlib, sys, mutants; sys.exit(mutants.main(sys.argv[2:], "
        "pathlib.Path(sys.argv[1]), ['pytest']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "4", "--seed", "3", "--night", "jstep/room"],
        cwd=Path(mutants.__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = [
        line.split() for line in done.stdout.splitlines() if line.startswith("jstep/room/work.py:")
    ]
    by = {
        row[0].rpartition(":")[2]: row[2]
        for row in rows
        if row[1] in ("operator", "value", "return")
    }
    assert by == {"2": "day", "6": "night", "10": "nobody", "14": "nobody"}
    assert "no quick test reaches it" in done.stdout
    assert "-    return x + 1\n" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "noticed by day: 1, noticed by night: 1, noticed by nobody: 2"
    )
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in PROJECT} == PROJECT


def test_the_soak_test_runs(tmp_path):
    state, found = soak.soak(40, str(tmp_path))
    assert state.global_step == 40
    assert len(found) == 40
    parts = soak.least_by_part(found)
    assert len(parts) == soak.PARTS
    assert parts[0]["arrays"] == min(one["arrays"] for one in found[:4])
    assert set(soak.growth(parts)) <= set(found[0])


def test_the_soak_test_finds_what_grows():
    found = [
        {"arrays": 20 + i % 3, "threads": 4, "descriptors": 9, "objects": 10, "bytes": 1}
        for i in range(40)
    ]
    assert soak.growth(soak.least_by_part(found)) == {}
    for i, one in enumerate(found):
        one["arrays"] += i
    assert soak.growth(soak.least_by_part(found)) == {"arrays": (37, 56)}
