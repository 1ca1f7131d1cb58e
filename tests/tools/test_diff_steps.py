"""The words in which `diff` places a step among the common steps."""

import json

import pytest


def log(path, values):
    lines = (
        json.dumps({"step": step, "state": f"{value:016x}", "leaves": {"w": f"{value:016x}"}})
        for step, value in values.items()
    )
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ({3: 3}, "identical at the only common step, 3"),
        ({1: 1, 3: 3, 9: 9}, "identical at all 2 common steps, 1 to 3"),
        ({3: 0}, "the runs diverge at step 3 (the only common step)"),
        ({1: 0, 3: 0}, "the runs diverge at step 1 (the first of 2 common steps)"),
        ({1: 1, 2: 0, 3: 0}, "the runs diverge at step 2 (identical at 1 earlier common step, of 3)"),
        ({1: 1, 2: 2, 3: 0}, "the runs diverge at step 3 (identical at 2 earlier common steps, of 3)"),
    ],
)
def test_the_place_of_a_step_among_the_common_steps(tmp_path, cli, b, expected):
    logs = log(tmp_path / "a", {1: 1, 2: 2, 3: 3}), log(tmp_path / "b", b)
    output = cli("diff", *logs, code=0 if expected.startswith("identical") else 1)
    assert output.out.splitlines()[0] == expected
