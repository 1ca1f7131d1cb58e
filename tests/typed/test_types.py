"""What type checkers see of a user's program: `program.py` asserts types, and marks the lines that are errors."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("program.py")
MARKED = {number for number, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# E")}


def lines_of_mypy(strict, tmp_path):
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", *["--strict"][: bool(strict)]]
    output = subprocess.run([*command, str(PROGRAM)], capture_output=True, text=True, timeout=500).stdout
    return {int(line) for line in re.findall(r"program\.py:(\d+): error", output)}, output


def lines_of_pyright(strict, tmp_path):
    pytest.importorskip("pyright")
    mode = {"typeCheckingMode": "strict" if strict else "basic", "include": ["program.py"]}
    config = tmp_path / "pyrightconfig.json"
    shutil.copy(PROGRAM, tmp_path)
    config.write_text(json.dumps(mode | {"extraPaths": [str(PROGRAM.parents[2])]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(config), "--pythonpath", sys.executable]
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


@pytest.mark.thorough
def test_few_functions_return_any(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import inspect, jstep\n"
        "names = [name for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]\n"
        "open('revealed.py', 'w').write('import jstep\\n' + ''.join(f'reveal_type(jstep.{one})\\n' for one in names))\n"
    )
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, check=True, timeout=200)
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", "revealed.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500).stdout
    revealed = re.findall(r'Revealed type is "(.*)"', output)
    assert len(revealed) > 100, output
    assert len([one for one in revealed if one == "Any" or one.endswith("-> Any")]) <= 12, output
