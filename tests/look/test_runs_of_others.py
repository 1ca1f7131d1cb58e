"""Records that hold anything: whatever is in one run, the others are shown, and this one says why
not."""

import argparse
import json
import logging
import os
import time
import tracemalloc

import pytest
from foreign_texts import CONTROL, assert_printable, printed
from written_runs import make_setup, start, write_run, write_start

import jstep
from jstep.look import cli
from jstep.stores.owners import this_process

HOSTILE = [
    *(None, True, -1, 0, 1.5, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf")),
    *(
        "", "many", "\x1b[31mred\x7f\u202e\n", "\ud800", "\0", "x" * 100_000, "../../..",
        "s3://bucket/x",
    ),
    *([], {}, [1], ["a", 1], [[0, 1], {}], {"": ""}, {"0": {"0": [1]}}, {"path": 5, "step": "x"}),
]  # fmt: skip


def seen(where, name="good"):
    """All that the tools show of a folder; return the row and the object of one run."""
    found = jstep.runs(where)
    str(found), found._repr_html_(), found.differences()
    for run in found:
        assert run.error is None or run.status == "unreadable"
        assert all(type(value) is float for value in (run.wall_seconds, *run.metrics.values()))
        assert all(type(value) is float and type(step) is int for value, step in run.best.values())
        numbers = (run.step, run.last_step, run.parameters, run.peak_bytes)
        assert all(type(count) in (int, type(None)) for count in numbers)
        assert all(
            type(text) is str
            for text in (run.path, run.prefix, run.reason, run.devices, run.commit or "")
        )
    return next((run for run in found if run.path.endswith(name)), None), found


def show(where, bad, capsys):
    for command in (
        *(["runs", where], ["runs", where, "--json"], ["runs", where, "--differences"]),
        *(
            ["runs", where, "--sort", name]
            for name in ("run", "status", "step", "since", "wall", "on", "loss")
        ),
        *(
            ["goodput", bad],
            ["diff", bad],
            ["stalls", bad],
            ["diff", bad, bad],
            ["events", bad, "--name", "x"],
        ),
        ["report", where, "-o", os.devnull],
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


def replaced(fields):
    """The fields with each of their values replaced, one at a time; and the name of the value."""
    for name in (*fields, "unknown"):
        for value in HOSTILE:
            yield name, {**fields, name: value}
    for name, inner in fields.items():
        for key in inner if isinstance(inner, dict) else ():
            for value in HOSTILE:
                yield f"{name}.{key}", {**fields, name: {**inner, key: value}}


@pytest.mark.parametrize(
    "fields",
    [
        {"parent": {"path": "", "step": 5}},
        {"peak_bytes": 2**63},
        {"seconds": {"starting": 10**400}},
    ],
)
def test_one_bad_start(fields, tmp_path, capsys):
    (name,) = fields
    write_run(tmp_path / "good")
    expected, _ = seen(tmp_path)
    write_run(tmp_path / "bad", **fields)
    good, found = seen(tmp_path)
    assert good == expected
    assert f"its newest start has {name}=" in found[0].error
    assert cli.main(["runs", str(tmp_path)]) == 1
    assert f"its newest start has {name}=" in capsys.readouterr().out


def test_the_other_starts_of_a_run_are_shown(tmp_path, capsys):
    write_run(tmp_path)
    write_run(tmp_path, 2, config=7)
    (run,) = jstep.runs(tmp_path)
    assert (run.status, run.step, run.config, run.error) == ("finished", 10, {"lr": 0.1}, None)
    assert run.reason == "its newest start has config=7, which is not valid"
    assert [one["status"] for one in run.starts] == ["finished", "unreadable"]
    assert jstep.goodput(tmp_path).steps == 10
    show(tmp_path, tmp_path, capsys)


def test_a_start_of_a_newer_version(tmp_path):
    write_run(tmp_path)
    write_run(tmp_path, prefix="new", version=99, step={"from": 1})
    old, new = jstep.runs(tmp_path)
    assert (old.status, old.prefix, new.status, new.prefix) == (
        "finished",
        "model",
        "unreadable",
        "new",
    )
    assert "this jstep reads 2: update jstep" in new.error
    with pytest.raises(ValueError, match="none of its starts can be read"):
        jstep.goodput(tmp_path, "new")


def test_the_prefix_of_a_start_in_errors(tmp_path):
    write_run(tmp_path, prefix=CONTROL)
    (file,) = (file for file in (tmp_path / "starts").iterdir() if "card" not in file.name)
    file.write_bytes(b" " * 2**21)
    (run,) = jstep.runs(tmp_path)
    assert "has more than 1048576 bytes" in run.error
    assert_printable(run.error)
    with pytest.raises(ValueError, match="must be the prefix of a run") as raised:
        jstep.goodput(tmp_path)
    assert_printable(printed(raised.value))


def test_metrics_in_errors(tmp_path):
    write_run(tmp_path, values={CONTROL: 1.0})
    with pytest.raises(ValueError, match="must be a metric of the runs") as raised:
        jstep.report(tmp_path, tmp_path / "page.html", metric="other")
    assert_printable(printed(raised.value))


def test_each_line_of_a_command_is_printable(capsys):
    cli.answer(argparse.Namespace(json=False), {}, ["a \x1b[31mname\x9b"])
    assert capsys.readouterr().out == "a \\x1b[31mname\\x9b\n"


def test_warnings_of_other_libraries_in_a_command_are_printable(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler())
    cli.main(["runs", str(tmp_path)])
    assert (
        logging.lastResort.format(logging.makeLogRecord({"msg": "\x1b[31mred\nline"}))
        == "\\x1b[31mred\nline"
    )


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

    put(tmp_path / "bad" / "starts" / "model.000001.json")
    write_run(tmp_path / "good", end=None)
    put(tmp_path / "good" / "stalls" / "model.0.json")
    bad, good = jstep.runs(tmp_path)
    assert (bad.status, good.status) == ("unreadable", "killed")
    assert cli.main(["goodput", str(tmp_path / "bad")]) == 2
    assert cli.main(["stalls", str(tmp_path / "good")]) == 0
    assert (
        capsys.readouterr().err.count("Is a directory" if kind == "directory" else "regular file")
        == 1
    )


def stall(**fields):
    own = {
        "version": 1, "prefix": "model", "process": 0, "processes": 2, "stall": True, "since": 1.0,
        "renewed": 1.0,
    }  # fmt: skip
    return {
        **own, **this_process(), "kind": "batch", "what": "waiting", "line": "x.py:1", "step": 3,
        **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"processes": 2**31}, "process=0 of processes=2147483648 is not possible"),
        ({"process": 2}, "process=2 of processes=2 is not possible"),
        ({"pid": 10**400}, "not the file of a stall"),
        ({"step": "x"}, "not the file of a stall"),
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
    (tmp_path / "stalls" / "model.5.json").write_text(
        json.dumps(stall(process=5, processes=100_000))
    )
    assert cli.main(["stalls", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip("* ").split()[0] for line in lines[1:]] == ["5", "0–4", "6–99999"]


@pytest.mark.thorough(except_for=["\\u202eevil\\u2066"])
@pytest.mark.parametrize("text", ["\x1b[31mred", "\u202eevil\u2066", "line\rbreak\n"])
def test_control_characters_reach_no_terminal(text, tmp_path, capsys):
    fields = {
        "values": {f"{text}/loss": 1.0},
        "end": ["failed", f"E: {text}"],
        "devices": text,
        "argv": [text],
    }
    fields |= {"setup_fields": {"stages": {"0": text}}, "config": {text: 1, "b": text}}
    write_run(tmp_path / f"a{text.strip()}", **fields)
    write_run(tmp_path / "b", config={text: 2, "b": 5})
    write_run(tmp_path / "bad", parameters=text)
    (tmp_path / "b" / "stalls").mkdir()
    (tmp_path / "b" / "stalls" / "model.0.json").write_text(
        json.dumps(stall(what=text, line=text, host=text))
    )
    (tmp_path / "b" / "stalls" / f"{text.strip()}.json").write_text(text)
    for bad in sorted(tmp_path.iterdir()):
        show(tmp_path, bad, capsys)
    found = str(jstep.runs(tmp_path)) + jstep.runs(tmp_path)._repr_html_()
    assert all(c.isprintable() or c == "\n" for c in found)
    for arguments in (["--metrics", f"x{text}"], ["--sort", f"x{text}"]):
        assert cli.main(["runs", str(tmp_path), *arguments]) == 2
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().err)


def damaged(folder):
    """A function that writes a start in `folder` with a change, and each change with its name."""
    for name, changed in replaced(start(folder)):
        yield (
            f"start.{name}",
            lambda c=changed: write_start(
                folder, {**c, "prefix": "model", "number": 1}, make_setup()
            ),
        )
    for name, changed in replaced(make_setup()):
        yield f"setup.{name}", lambda c=changed: write_start(folder, start(folder), c)
    for name, changed in replaced(stall()):
        text = json.dumps(changed)
        yield f"stall.{name}", lambda t=text: (folder / "stalls" / "model.0.json").write_text(t)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_each_field_with_each_hostile_value(part, tmp_path, capsys):
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
            if n % 40 == part:
                show(tmp_path, bad, capsys)


@pytest.mark.thorough(except_for=["brackets0-150-finished", "brackets1-100000-unreadable"])
@pytest.mark.parametrize(
    ("depth", "status"), [(150, "finished"), (300, "unreadable"), (100_000, "unreadable")]
)
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"": ', "}")])
def test_a_config_may_be_deep(depth, status, brackets, tmp_path, capsys):
    deep = brackets[0] * depth + "0" + brackets[1] * depth
    write_run(tmp_path / "good")
    write_run(tmp_path / "other", config={"deep": "!"})
    path = tmp_path / "other" / "starts" / "model.000001.json"
    path.write_text(path.read_text().replace('"!"', deep))
    assert [run.status for run in jstep.runs(tmp_path)] == ["finished", status]
    show(tmp_path, tmp_path / "other", capsys)
