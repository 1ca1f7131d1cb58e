"""Timelines, cards, stall files and claims with any content: the other runs are shown, and for this one why not."""

import contextlib
import json
import os
import random
import time
import tracemalloc

import pytest
from jstep.hooks.cards import read_starts
from written_runs import PROGRAM, card_line, start_line, times_line, write_lines, write_run

import jstep
from jstep.stores.owners import this_process
from jstep.tools import cli
from jstep.tools.cli_compare import differences
from jstep.tools.goodput import goodput

DEEP = "[" * 3000 + "]" * 3000
HOSTILE = [
    *(None, True, -1, 0, 1.5, 2**31, 2**63, 10**400, -(10**400), 1e308, float("nan"), float("inf"), -0.0),
    *("", "many", "\x1b[31mred\x7f\u202e\n", "\ud800", "\0", "x" * 100_000, "9" * 5000, "../../..", "s3://bucket/x"),
    *([], {}, [1], ["a", 1], [[0, 1], {}], {"": ""}, {"0": {"0": [1]}}, {"path": 5, "step": "x"}),
]


def seen(where, name="good"):
    """All that the tools show of a folder; return the row and the object of one run."""
    found = jstep.runs(where)
    str(found), found._repr_html_(), found.differences()
    for run in found:
        assert run.error is None or run.status == "unreadable"
        assert all(type(value) is float for value in (run.wall_seconds, *run.metrics.values()))
        assert all(type(value) is float and type(step) is int for value, step in run.best.values())
        assert all(
            type(count) in (int, type(None)) for count in (run.step, run.last_step, run.parameters, run.peak_bytes)
        )
        assert all(type(text) is str for text in (run.path, run.prefix, run.reason, run.devices, run.commit or ""))
    return next((run for run in found if run.path.endswith(name)), None), found


def show(where, bad, capsys):
    for command in (
        *(["runs", where], ["runs", where, "--json"], ["runs", where, "--differences"]),
        *(["runs", where, "--sort", name] for name in ("run", "status", "step", "since", "wall", "on", "loss")),
        *(["goodput", bad], ["diff", bad], ["stalls", bad], ["diff", bad, bad]),
        *(["rows", bad, "--step", "3"], ["events", bad, "--name", "x"]),
    ):
        begin = time.process_time()
        code = cli.main([os.fspath(word) for word in command])
        output = capsys.readouterr()
        assert code in (0, 1, 2), command
        assert time.process_time() - begin < 5.0, command
        assert "Traceback" not in output.err, (command, output.err)
        for text in output:
            assert all(c.isprintable() or c == "\n" for c in text), (command, text)
            assert len(text) < 2e6, command
            text.encode()


def replaced(line):
    """The line with each of its values replaced, one at a time; and the name of the value."""
    for name in (*line, "unknown"):
        for value in HOSTILE:
            yield name, {**line, name: value}
    for name, inner in line.items():
        for key in inner if isinstance(inner, dict) else ():
            for value in HOSTILE:
                yield f"{name}.{key}", {**line, name: {**inner, key: value}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"start": {"parameters": "many"}}, "parameters='many'"),
        ({"start": {"parent": {"path": "", "step": 5}}}, "parent="),
        ({"start": {"process": [1]}}, "process="),
        ({"times": {"values": {"loss": "low"}}}, "values="),
        ({"times": {"best": {"loss": 5}}}, "best="),
        ({"times": {"peak_bytes": 2**63}}, "peak_bytes="),
        ({"times": {"end": ["finished", 5]}}, "end="),
        ({"times": {"seconds": {"starting": 10**400}}}, "seconds="),
    ],
)
def test_one_bad_timeline(fields, name, tmp_path, capsys):
    write_run(tmp_path / "good")
    expected, _ = seen(tmp_path)
    write_run(tmp_path / "bad", **fields)
    good, found = seen(tmp_path)
    assert good == expected
    assert name in found[0].error
    assert cli.main(["runs", str(tmp_path)]) == 1
    assert f"its timeline has {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"arguments": 5}, "arguments=5"),
        ({"programs": [{**PROGRAM, "elements": {"adam": 3}}]}, "programs: elements="),
        ({"programs": [7]}, "programs=7"),
        ({"lanes": "x"}, "lanes='x'"),
        ({"stages": {"9" * 5000: "x"}}, "stages="),
        ({"card": 2, "state": []}, "of a newer version (2)"),
    ],
)
def test_one_bad_card(fields, name, tmp_path, capsys):
    for run in ("good", "other"):
        write_run(tmp_path / run, card={"config": {"lr": run}})
    expected = jstep.runs(tmp_path).differences()
    assert expected == {"config: lr": ["good", "other"]}
    write_run(tmp_path / "bad", card=fields)
    assert jstep.runs(tmp_path).differences() == {"config: lr": [None, "good", "other"]}
    assert cli.main(["runs", str(tmp_path), "--differences"]) == 1
    assert name in capsys.readouterr().err
    assert name in read_starts(str(tmp_path / "bad"))[0].problem
    assert cli.main(["diff", str(tmp_path / "bad")]) == 0
    assert name in capsys.readouterr().out


def test_a_timeline_of_a_newer_version(tmp_path, capsys):
    newer = {"version": 99, "kind": "start", "start": "z", "prefix": "new"}
    last = {**times_line(start="z", prefix="new"), "step": {"from": 1}, "values": [1]}
    write_lines(tmp_path, start_line(tmp_path), times_line(), newer, last)
    old, new = jstep.runs(tmp_path)
    assert (old.status, old.prefix, old.step) == ("finished", "model", 10)
    assert (new.status, new.prefix) == ("unreadable", "new")
    assert "of a newer version (99)" in new.error
    assert cli.main(["runs", str(tmp_path)]) == 1
    assert "of a newer version (99)" in capsys.readouterr().out
    assert jstep.goodput(tmp_path).steps == 10
    with pytest.raises(ValueError, match=r"line 3 is of a newer version \(99\)"):
        jstep.goodput(tmp_path, "new")
    for start in (newer | {"start": 5, "prefix": None}, {"kind": "start", "version": 99}, newer | {"time": "now"}):
        write_lines(tmp_path, start)
        assert "of a newer version (99)" in jstep.runs(tmp_path)[0].error


@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_what_is_not_a_file_is_never_opened(kind, tmp_path, capsys):
    def put(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")

    put(tmp_path / "bad" / "timeline.jsonl")
    write_run(tmp_path / "good", times={"end": None})
    put(tmp_path / "good" / "stalls" / "model.0.json")
    put(tmp_path / "good" / ".model.jstep-writer")
    bad, good = jstep.runs(tmp_path)
    assert (bad.status, good.status) == ("unreadable", "killed")
    text = "Is a directory" if kind == "directory" else "is not a regular file"
    assert text in bad.error
    assert cli.main(["goodput", str(tmp_path / "bad")]) == 2
    assert cli.main(["stalls", str(tmp_path / "good")]) == 0
    assert capsys.readouterr().err.count(text) == 2


def stall(**fields):
    own = {"version": 1, "prefix": "model", "process": 0, "processes": 2, "stall": True, "since": 1.0, "renewed": 1.0}
    return {**own, **this_process(), "kind": "batch", "what": "waiting", "line": "x.py:1", "step": 3, **fields}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"processes": 2**31}, "process=0 of processes=2147483648 is not possible"),
        ({"process": 2}, "process=2 of processes=2 is not possible"),
        ({"pid": 10**400}, "pid=1000"),
        ({"since": float("nan")}, "since=nan"),
        ({"step": "x"}, "step='x'"),
        ({"what": "x" * 2**16}, "has more than 65536 bytes"),
    ],
)
def test_one_bad_stall_file(fields, problem, tmp_path, capsys):
    (tmp_path / "stalls").mkdir()
    (tmp_path / "stalls" / "model.1.json").write_text(json.dumps(stall(process=1)))
    (tmp_path / "stalls" / "model.0.json").write_text(json.dumps(stall(**fields)))
    tracemalloc.start()
    assert cli.main(["stalls", str(tmp_path)]) == 1
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    output = capsys.readouterr()
    assert problem in output.err
    assert "waiting" in output.out


def test_silent_processes_are_shown_in_ranges(tmp_path, capsys):
    (tmp_path / "stalls").mkdir()
    (tmp_path / "stalls" / "model.5.json").write_text(json.dumps(stall(process=5, processes=100_000)))
    assert cli.main(["stalls", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip("* ").split()[0] for line in lines[1:]] == ["5", "0–4", "6–99999"]


@pytest.mark.thorough(except_for=[r"\u202eevil\u2066"])
@pytest.mark.parametrize("text", ["\x1b[31mred", "a\x07\x7f\x9b", "\u202eevil\u2066", "line\rbreak\n"])
def test_control_characters_reach_no_terminal(text, tmp_path, capsys):
    metrics = {"values": {f"{text}/loss": 1.0}, "best": {f"{text}best": [1.0, 1]}, "end": ["failed", f"E: {text}"]}
    card = {"config": {text: 1, "b": text}, "argv": [text], "stages": {"0": text}}
    write_run(tmp_path / f"a{text.strip()}", start={"devices": text}, times=metrics, card=card)
    write_run(tmp_path / "b", times={"values": {}}, card={"config": {text: 2, "b": 5}})
    write_lines(tmp_path / "bad", start_line(tmp_path, parameters=text), f'{{"torn": "{text}"'.encode())
    (tmp_path / "b" / "stalls").mkdir()
    (tmp_path / "b" / "stalls" / "model.0.json").write_text(json.dumps(stall(what=text, line=text, host=text)))
    (tmp_path / "b" / "stalls" / f"{text.strip()}.json").write_text(text)
    for bad in sorted(tmp_path.iterdir()):
        show(tmp_path, bad, capsys)
    found = str(jstep.runs(tmp_path)) + jstep.runs(tmp_path)._repr_html_()
    assert all(c.isprintable() or c == "\n" for c in found)
    assert cli.main(["runs", str(tmp_path), "--metrics", f"x{text}"]) == 2
    assert cli.main(["runs", str(tmp_path), "--sort", f"x{text}"]) == 2
    assert cli.main(["runs", str(tmp_path / f"x{text}")]) == 2
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().err)


def damaged(folder):
    """A function that writes the timeline of `folder` with a changed line, and each change with its name."""
    parts = {"start": start_line(folder), "card": card_line(), "times": times_line(end=None)}
    for kind, line in parts.items():
        for name, changed in replaced(line):
            yield f"{kind}.{name}", lambda k=kind, c=changed: write_lines(folder, *({**parts, k: c}).values())
    for name, changed in replaced(PROGRAM):
        yield f"program.{name}", lambda c=changed: write_run(folder, card={"programs": [c]})
    for name, changed in replaced(stall()):
        text = json.dumps(changed)
        yield f"stall.{name}", lambda t=text: (folder / "stalls" / "model.0.json").write_text(t)
    for name, changed in replaced(this_process()):
        text = json.dumps(changed)
        yield f"claim.{name}", lambda t=text: (folder / ".model.jstep-writer").write_text(t)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_each_field_with_each_hostile_value(part, tmp_path, capsys, caplog):
    bad = tmp_path / "bad"
    write_run(tmp_path / "good")
    expected, _ = seen(tmp_path)
    (bad / "stalls").mkdir(parents=True)
    for n, (name, change) in enumerate(damaged(bad)):
        change()
        if n % 4 == part:
            good, found = seen(tmp_path)
            assert good == expected, name
            assert len(found) >= 2, name
            with caplog.at_level("CRITICAL"), contextlib.suppress(ValueError, OSError):
                str(goodput(bad))
            if n % 40 == part:
                show(tmp_path, bad, capsys)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_random_bytes(seed, tmp_path, capsys):
    bad, rng = tmp_path / "bad", random.Random(seed)
    for name in ("good", "bad"):
        write_run(tmp_path / name, times={"end": None})
        (tmp_path / name / "stalls").mkdir()
        (tmp_path / name / "stalls" / "model.0.json").write_text(json.dumps(stall()))
        (tmp_path / name / ".model.jstep-writer").write_text(json.dumps(this_process()))
    expected, _ = seen(tmp_path)
    files = [bad / "timeline.jsonl", bad / "stalls" / "model.0.json", bad / ".model.jstep-writer"]
    whole = {file: file.read_bytes() for file in files}
    for n in range(150):
        for file in files:
            data = bytearray(whole[file])
            for _ in range(rng.choice((1, 1, 3, 30))):
                at = rng.randrange(len(data))
                data[at : at + rng.choice((0, 1, 1, 8))] = rng.choice(
                    (b"", rng.randbytes(1), b"9", b"]", b"null", b"-", b"1e999", b'"', b"\xff", b"\n", DEEP.encode())
                )
            file.write_bytes(data)
        good, found = seen(tmp_path)
        assert good == expected, n
        assert len(found) >= 2
        if n % 10 == 0:
            show(tmp_path, bad, capsys)


@pytest.mark.thorough
def test_long_lines(tmp_path):
    write_run(tmp_path / "good")
    for line in (b"[" * 10**8, b'{"kind": "start", "start": "a", "prefix": "model", "x": "' + b"x" * 10**8 + b'"}'):
        write_lines(tmp_path / "bad", line)
        begin = time.process_time()
        bad, good = jstep.runs(tmp_path)
        assert time.process_time() - begin < 5.0
        assert (bad.status, good.status) == ("unreadable", "finished")
        assert "has more than" in bad.error


@pytest.mark.thorough(except_for=["brackets0-190-finished", "brackets1-100000-unreadable"])
@pytest.mark.parametrize(("depth", "status"), [(190, "finished"), (300, "unreadable"), (100_000, "unreadable")])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"": ', "}")])
def test_a_config_may_be_deep(depth, status, brackets, tmp_path, capsys):
    deep = brackets[0] * depth + "0" + brackets[1] * depth
    lines = [start_line(tmp_path, config={"deep": "!"}), card_line(config={"deep": "!"})]
    texts = [json.dumps(line).replace('"!"', deep).encode() for line in lines]
    write_run(tmp_path / "good")
    write_lines(tmp_path / "other", *texts, times_line())
    assert [run.status for run in jstep.runs(tmp_path)] == ["finished", status]
    show(tmp_path, tmp_path / "other", capsys)


@pytest.mark.parametrize("kind", ["an invalid card", "no card", "a newer card that took no step"])
def test_which_card_is_that_of_a_run(kind, tmp_path):
    """A card that is invalid is never replaced by an older one."""
    write_run(tmp_path / "good", card={"config": {"lr": 1}})
    trained = {"an invalid card": [card_line(start="b", programs=7)]}.get(kind, [])
    later = [start_line(tmp_path, start="c"), card_line(start="c", config={"lr": 3})]
    later = [*later, times_line(start="c", step=None)] if kind == "a newer card that took no step" else []
    write_lines(
        tmp_path / "run",
        *(start_line(tmp_path, start="a"), card_line(start="a", config={"lr": 2}), times_line(start="a")),
        *(start_line(tmp_path, start="b"), *trained, times_line(start="b"), *later),
    )
    problems = []
    compared = differences([(str(tmp_path / "good"), "model"), (str(tmp_path / "run"), "model")], problems)
    of_runs = jstep.runs(tmp_path).differences()
    if kind == "an invalid card":
        assert (compared, of_runs) == (None, {})
        assert problems == [f"{tmp_path / 'run'}: its card is invalid: programs=7"]
    else:
        assert (compared, of_runs) == (["config: lr: 1 in A, 2 in B"], {"config: lr": [1, 2]})
        assert problems == []
