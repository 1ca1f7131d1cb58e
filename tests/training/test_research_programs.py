"""Eight programs of research agree with their originals, and end with the same bits after three
kills."""

import pathlib
import re
import signal

import forked
import pytest
import research_programs

PROGRAM = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(research_programs.__file__).parent)!r})
import research_programs
research_programs.main(*sys.argv[1:])
"""
KILLS = (3, 6, 11)
"""Steps after which a program kills itself. It saves every second step, in the background."""


def finished(name, directory, *kill_at):
    program = forked.start(PROGRAM, name, directory, *kill_at)
    out, errors = program.communicate(300)
    return program.returncode, out, errors


def result(name, directory):
    code, out, errors = finished(name, directory)
    assert code == 0, errors
    *fingerprint, deviation = re.findall(r"[\d.e+-]+", out)
    assert len(fingerprint) == 2
    return fingerprint, float(deviation)


@pytest.mark.thorough
@pytest.mark.parametrize("name", research_programs.PROGRAMS)
def test_a_program_agrees_with_its_original_and_survives_three_kills(name, tmp_path):
    for step in KILLS:
        code, _, errors = finished(name, tmp_path / "killed", step)
        assert code == -signal.SIGKILL, errors
    killed = result(name, tmp_path / "killed")
    _, deviation = killed
    assert deviation < 1e-12
    assert result(name, tmp_path / "whole") == killed
