"""What type checkers see of a user's program: `program.py` asserts types, and marks the lines that
are errors."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("program.py")
MARKED = {
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# E")
}


CACHE = PROGRAM.parents[2] / ".mypy_cache"
"""Without a cache, most of the time goes to the types of JAX. Each set of options needs a cache of
its own."""


def lines_of_mypy(strict, tmp_path):
    cache = f"--cache-dir={CACHE / ('strict' if strict else 'basic')}"
    command = [sys.executable, "-m", "mypy", "--config-file=", cache, *["--strict"][: bool(strict)]]
    output = subprocess.run(
        [*command, str(PROGRAM)], capture_output=True, text=True, timeout=500
    ).stdout
    return {int(line) for line in re.findall(r"program\.py:(\d+): error", output)}, output


def lines_of_pyright(strict, tmp_path):
    pytest.importorskip("pyright")
    mode = {"typeCheckingMode": "strict" if strict else "basic", "include": ["program.py"]}
    config = tmp_path / "pyrightconfig.json"
    shutil.copy(PROGRAM, tmp_path)
    config.write_text(json.dumps(mode | {"extraPaths": [str(PROGRAM.parents[2])]}))
    command = [
        sys.executable, "-m", "pyright", "--outputjson", "-p", str(config), "--pythonpath",
        sys.executable,
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, timeout=500).stdout
    found = json.loads(output)
    assert found["summary"]["filesAnalyzed"] == 1, output
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    return {one["range"]["start"]["line"] + 1 for one in errors}, output


@pytest.mark.thorough
@pytest.mark.parametrize("strict", [False, True], ids=["basic", "strict"])
@pytest.mark.parametrize("lines", [lines_of_mypy, lines_of_pyright], ids=["mypy", "pyright"])
def test_a_checker_sees_the_types_and_the_errors_of_a_program(lines, strict, tmp_path):
    found, output = lines(strict, tmp_path)
    assert found == MARKED, output


ANY = {
    "averaged_model_state": "a tree of the user's, which the state does not know",
    "fsdp_specs": "a tree of specs in the form of the parameters",
    "get_hyperparameter": "a float, in a traced step an array",
}
"""The functions that return `Any`, and what it is."""


@pytest.mark.thorough
def test_few_functions_return_any(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import inspect, jstep\n"
        "names = [name for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]\n"
        "open('revealed.py', 'w').write('import jstep\\n' + "
        "''.join(f'reveal_type(jstep.{one})\\n' for one in names))\n"
    )
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, check=True, timeout=200)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        f"--cache-dir={CACHE / 'basic'}",
        "revealed.py",
    ]
    output = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500
    ).stdout
    names = re.findall(r"jstep\.(\w+)", (tmp_path / "revealed.py").read_text())
    revealed = re.findall(r'Revealed type is "(.*)"', output)
    assert len(revealed) == len(names) > 100, output
    any_of = {
        name
        for name, one in zip(names, revealed, strict=True)
        if one == "Any" or re.search(r"-> Any\W*$", one)
    }
    assert any_of == set(ANY)
