"""`goodput`: runs with several starts, lost steps, and starts that cannot be read."""

import json
import shutil

import pytest
from written_runs import start, write_start

import jstep
from jstep.look.cli import main
from jstep.record.process_files import ProcessFile


def write(folder, *starts, prefix="model"):
    """Write starts: (when it began, its steps, seconds by part, its saves as step and seconds of
    stepping)."""
    for number, (began, step, seconds, *saves) in enumerate(starts, 1):
        fields = {
            "began": began,
            "now": began + sum(seconds.values()),
            "step": step,
            "seconds": seconds,
        }
        saved = [[at, stepping, None, None] for at, stepping in saves]
        write_start(folder, start(folder, number, prefix, saved=saved, **fields))


# The second start repeats 37 of the 137 steps of the first one; the third one was killed while it
# restored.
SEVERAL = [
    (
        1000.0,
        [0, 137],
        {"starting": 10.0, "stepping": 120.0, "waiting": 11.0, "saving": 9.0},
        (50, 45.0),
        (100, 90.0),
    ),
    (1175.0, [100, 150], {"starting": 10.0, "stepping": 40.0, "hooks": 2.0, "evaluating": 3.0}),
    (1239.0, None, {"starting": 1.0}),
    (1250.0, [150, 200], {"starting": 10.0, "stepping": 40.0}),
]


def test_several_starts(tmp_path, capsys):
    write(tmp_path, *SEVERAL)
    found = jstep.goodput(tmp_path)
    assert found.parts == {
        "productive": 90.0 + 40.0 + 40.0,
        "rewound": 30.0,
        "before": 0.0,
        "starting": 10.0 + 10.0 + 1.0 + 10.0,
        "waiting": 11.0,
        "saving": 9.0,
        "evaluating": 3.0,
        "hooks": 2.0,
        "down": 25.0 + 9.0 + 10.0,
        "stalled": 0.0,
    }
    assert (found.total, found.starts, found.steps) == (300.0, 4, 200)
    assert found.fraction == 170.0 / 300.0
    assert hash(found) == hash(jstep.goodput(tmp_path))
    text = str(found).splitlines()
    assert text[:3] == [
        "goodput 56.7 %: 200 steps in 300 s, 4 starts",
        "  productive  170.000 s   56.7 %",
        "  rewound      30.000 s   10.0 %",
    ]
    assert main(["goodput", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[: len(text)] == text
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found_json = json.loads(out)
    assert (found_json.pop("notes"), found_json.pop("computing")) == ([*found.notes], 0.0)
    parts = {part: secs for part, secs in found.parts.items() if part != "stalled"}
    expected = {
        "version": 1,
        **parts,
        "starts": 4,
        "steps": 200,
        "processes": 1,
        "total": 300.0,
        "fraction": found.fraction,
    }
    assert found_json == expected


# The part, seconds by process in 100 steps, the slow processes, and the row of the first of them.
PROCESSES = [
    ("waiting", [0.1, 2.0], [1], "waiting of process 1 (host1) 20 ms a step others 1"),
    ("hooks", [2.0, 0.9, 0.9], [0], "hooks of process 0 (host0) 20 ms a step others 9"),
    ("evaluating", [0.0, 0.0, 1.0], [2], "evaluating of process 2 (host2) 10 ms a step others 0"),
    (
        "waiting",
        [0.5, *[3.0] * 9, *[1.0] * 20],
        [1, 2, 3, 4, 6, 7, 8, 9],
        "waiting of process 1 (host1) 30 ms a step others 10",
    ),
    ("saving", [1.0, 1.9, 1.0], [], ""),
    ("stepping", [1.0, 9.0], [], ""),
    ("waiting", [0.001, 0.009], [], ""),
]


@pytest.mark.parametrize(("part", "seconds", "slow", "row"), PROCESSES)
def test_a_process_that_takes_twice_as_long_as_the_others_has_a_row(
    part, seconds, slow, row, tmp_path, capsys
):
    def recorded(process):
        return {
            "step": [0, 100],
            "process": {"host": f"host{process}"},
            "seconds": {"stepping": 1.0, part: seconds[process]},
        }

    for number in (1, 2):
        write_start(tmp_path, start(tmp_path, number, processes=len(seconds), **recorded(0)))
    for process in range(1, len(seconds)):
        # One did not record the newest start.
        fields = {"start": 1 if process == 5 else 2, "written": 1e9}
        ProcessFile(str(tmp_path), "model", process, fields).write(recorded(process))
    assert main(["goodput", str(tmp_path)]) == 0
    head, *lines = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert head.endswith(f"2 starts, times of process 0 of {len(seconds)}")
    assert [line for line in lines if " of process " in line][:1] == [row] * bool(slow)
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["part"], one["process"]) for one in found.get("slow", [])] == [
        (part, process) for process in slow
    ]


def test_a_stall_is_taken_out_of_the_part_that_it_was_in(tmp_path, capsys):
    """Of the steps of the first start, the second repeats those after step 50."""
    stalls = [
        (20, "stepping", 7.0),
        (90, "stepping", 5.0),
        (90, "waiting", 6.0),
        (90, "hooks", 1.0),
        (90, None, 9.0),
    ]
    names = ("step", "part", "stalled")
    fields = {
        "stalls": [dict(zip(names, stall, strict=True)) for stall in stalls],
        "saved": [[50, 20.0, None, None]],
    }
    seconds = {"stepping": 40.0, "waiting": 8.0}
    write_start(
        tmp_path, start(tmp_path, 1, began=1000.0, step=[0, 100], seconds=seconds, **fields)
    )
    write_start(
        tmp_path, start(tmp_path, 2, began=1050.0, step=[50, 100], seconds={"stepping": 20.0})
    )
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.waiting, found.down) == (33.0, 15.0, 2.0, 2.0)
    assert found.stalled == {"productive": 7.0, "rewound": 5.0, "waiting": 6.0}
    assert (found.parts["stalled"], found.total, found.fraction) == (18.0, 70.0, 33.0 / 70.0)
    shown = [line.split()[:2] for line in str(found).splitlines()]
    assert shown[5:8] == [["stalled", "18.000"], ["productive", "7.000"], ["rewound", "5.000"]]
    assert main(["runs", str(tmp_path), "--starts", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)[0]["milliseconds"]
    assert (times["stepping"], times["waiting"], times["stalled"]) == (280.0, 20.0, 180.0)
    page = jstep.report(tmp_path).html
    assert "stalled 18 s (25.7%)" in page


def test_a_step_between_two_saves_is_interpolated(tmp_path):
    a = (40.0, [0, 30], {"stepping": 50.0}, (10, 10.0))
    write(tmp_path, a, (90.0, [20, 20], {"starting": 1.0}), (91.0, [15, 15], {"starting": 1.0}))
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.steps) == (20.0, 30.0, 15)


def test_a_start_from_a_checkpoint_keeps_the_time_that_was_saved_with_it(tmp_path):
    write(
        tmp_path,
        (60.0, [0, 12], {"stepping": 35.0}, (10, 30.0)),
        (100.0, [10, 11], {"stepping": 1.0}),
    )
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.steps) == (31.0, 5.0, 11)


def test_idle_time_before_a_start_is_counted_once(tmp_path):
    write(
        tmp_path,
        (50.0, [0, 10], {"stepping": 50.0}),
        (60.0, [10, 20], {"starting": 80.0, "stepping": 10.0}),
        (120.0, [20, 30], {"before": 60.0, "starting": 10.0, "stepping": 10.0}),
    )
    found = jstep.goodput(tmp_path)
    assert (found.down, found.before, found.starting, found.total) == (0.0, 30.0, 50.0, 150.0)


def test_runs_that_share_a_directory(tmp_path):
    write(
        tmp_path, (9.0, [0, 1], {"stepping": 1.0}), (25.0, [0, 5], {"stepping": 5.0}), prefix="net"
    )
    write(tmp_path, (18.0, [0, 2], {"stepping": 2.0}))
    assert jstep.goodput(tmp_path).steps == 2
    assert jstep.goodput(tmp_path, prefix="net").productive == 5.0
    with pytest.raises(
        ValueError,
        match=r"prefix='other': must be the prefix .* which has 'model', 'net'",
    ):
        jstep.goodput(tmp_path, prefix="other")


def test_starts_that_cannot_be_read_are_left_out(tmp_path):
    write(tmp_path, *SEVERAL[:2])
    expected = jstep.goodput(tmp_path)
    for number, wrong in enumerate(
        [{"seconds": {"stepping": -1}}, {"step": [9, 1]}, {"began": "then"}], 3
    ):
        write_start(tmp_path, start(tmp_path, number, **wrong))
    found = jstep.goodput(tmp_path)
    assert (found.parts, found.steps, found.starts) == (expected.parts, expected.steps, 5)


def test_directories_without_a_run(tmp_path, capsys):
    for where in (tmp_path, tmp_path / "nope"):
        with pytest.raises(FileNotFoundError, match=r"no run is there; give the checkpoint_dir"):
            jstep.goodput(where)
    with pytest.raises(TypeError, match="directory=3: must be a path or a URL"):
        jstep.goodput(3)
    assert main(["goodput", str(tmp_path)]) == 2
    assert "no run is there" in capsys.readouterr().err
    write_start(tmp_path, start(tmp_path, version=3))
    with pytest.raises(ValueError, match="none of its starts can be read"):
        jstep.goodput(tmp_path)


def test_a_directory_of_runs_and_their_total(tmp_path, capsys):
    write(tmp_path / "a", *SEVERAL)
    write(tmp_path / "b", (1000.0, [0, 10], {"starting": 5.0, "stepping": 15.0}))
    write(tmp_path / "b", (1000.0, [0, 10], {"stepping": 80.0}), prefix="other")
    write(tmp_path / "bad", (1000.0, [0, 10], {"stepping": -1.0}))
    assert main(["goodput", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert "jstep goodput: bad: its newest start has seconds=" in output.err
    lines = output.out.splitlines()
    assert lines[:2] == ["a:", "goodput 56.7 %: 200 steps in 300 s, 4 starts"]
    assert lines[lines.index("b:other:") + 1] == "goodput 100.0 %: 10 steps in 80 s, 1 start"
    total = lines[lines.index("all runs (3):") :]
    assert total[1] == "goodput 66.2 %: 220 steps in 400 s, 6 starts"
    assert total[2].split() == ["productive", "265.000", "s", "66.2", "%"]
    shutil.rmtree(tmp_path / "bad")
    assert main(["goodput", str(tmp_path), "--json", "--prefix", "model"]) == 0
    rows = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [(row["path"], row.get("prefix"), row["total"]) for row in rows] == [
        (f"{tmp_path}/a", "model", 300.0), (f"{tmp_path}/b", "model", 20.0),
        (str(tmp_path), None, 320.0),
    ]  # fmt: skip
    assert rows[-1]["runs"] == 2
