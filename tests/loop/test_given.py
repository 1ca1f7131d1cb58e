"""What a run was given: names and values of a config, secrets, the command line, a restart's lines."""

import argparse
import collections
import dataclasses
import enum
import json
import logging
import os
import pathlib
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.core import records
from jstep.loop import card, given

optimizer = jstep.gradient_descent(0.1)
train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
SECRET = "hunter2-hunter2-hunter2"


def train(last_step, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None} | options
    return jstep.train(train_step, state, lambda step: jnp.float32(1.0), last_step, **options)


@dataclasses.dataclass
class Options:
    lr: float = 0.1
    name: str = "adam"


class Level(enum.IntEnum):
    HIGH = 3


class Bad:
    def __repr__(self):
        raise ValueError


def test_names_are_joined():
    config = {"a": {"b": Options(), "empty": {}}, "c": argparse.Namespace(d=1), 3: 4}
    expected = {"a/b/lr": 0.1, "a/b/name": "adam", "a/empty": "{}", "c/d": 1, "3": 4}
    assert given.as_config(config) == expected
    assert given.as_config(Options()) == {"lr": 0.1, "name": "adam"}
    assert given.as_config(argparse.Namespace(x=1)) == {"x": 1}
    assert given.as_config({}) == {}
    assert given.as_config(None) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        (np.bool_(True), True),
        (jnp.bfloat16(0.5), 0.5),
        (float("nan"), "nan"),
        (pathlib.Path("/a/b"), "/a/b"),
        ((1, "x", None), [1, "x", None]),
        ({3, 1, 2}, [1, 2, 3]),
        (np.ones((2, 3), np.float32), "float32[2,3]"),
        (Level.HIGH, 3),
        (Bad(), "Bad"),
        ("http://user:pass@host/x?sig=1", "http://host/x"),
    ],
    ids=[f"{i}" for i in range(11)],
)
def test_values(value, expected):
    found = given.record_value("name", value)
    assert found == expected
    assert type(found) is type(expected)
    json.dumps(found, allow_nan=False)


def test_long_and_circular_values():
    long = given.record_value("text", "ab" * 2000)
    assert len(long) < 1050
    assert long.startswith("abab")
    assert long != given.record_value("text", "ab" * 2001)
    circle = []
    circle.append(circle)
    assert given.record_value("list", circle) == "[[...]]"
    config = {"a": 1}
    config["self"] = config
    assert set(given.as_config(config)) == {"a", "self"}


@pytest.mark.parametrize("name", ["secret", "db_password", "dbPassword", "DB-PASSWD", "a/pwd", "aws.credentials"])
@pytest.mark.parametrize("value", ["x", 5, ["x"]], ids=str)
def test_values_with_secret_names_are_left_out(name, value):
    assert given.record_value(name, value) == "(not recorded)"
    assert given.record_value(name, None) is None
    assert given.record_value(name, True) is True


def test_secrets_in_sequences_and_in_objects_are_left_out():
    pair, hidden = collections.namedtuple("Pair", "lr password")(0.1, "x"), "(not recorded)"
    options = argparse.Namespace(db_password="x", lr=0.1)
    attributes = type("Attributes", (), {"__repr__": lambda self: "Attributes(host='a', password='x y', n=3)"})()
    config = {
        "dbs": [{"host": "a", "password": "x"}, 3],
        "pair": pair,
        "deep": [[options]],
        "set": {pair},
        "other": attributes,
    }
    assert given.as_config(config) == {
        "dbs/0/host": "a", "dbs/0/password": hidden, "dbs/1": 3, "pair/lr": 0.1, "pair/password": hidden,
        "deep/0/0/db_password": hidden, "deep/0/0/lr": 0.1, "set": [f"Pair(lr=0.1, password={hidden})"],
        "other": f"Attributes(host='a', password={hidden}, n=3)",
    }  # fmt: skip
    assert given.as_config({"rows": [[1, 2], [3]], "none": [{}]}) == {"rows": [[1, 2], [3]], "none": ["{}"]}


@pytest.mark.parametrize("name", ["api_key", "apiKey", "hf_token", "auth", "tokens", "APIKey"])
def test_long_words_of_other_names_are_left_out(name):
    assert given.record_value(name, SECRET) == "(not recorded)"
    assert given.record_value(name, ["a", SECRET]) == "(not recorded)"
    assert given.record_value(name, "image") == "image"
    assert given.record_value(name, 1024) == 1024


@pytest.mark.parametrize("name", ["tokenizer", "monkey", "author", "keyboard", "pad"])
def test_other_names_stay(name):
    assert given.record_value(name, SECRET) == SECRET


@pytest.mark.parametrize("config", [[1], 3, "x", Options, object()], ids=["list", "int", "str", "class", "object"])
def test_other_objects_are_refused_before_anything_is_opened(config, tmp_path):
    with pytest.raises(TypeError, match=r"vars\(config\)"):
        train(1, checkpoint_dir=tmp_path / "a", config=config)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("config", [{"a/b": 1, "a": {"b": 2}}, {1: 1, "1": 2}], ids=["nested", "keys"])
def test_two_values_of_one_name_are_refused(config):
    with pytest.raises(ValueError, match="two of its values are called"):
        train(1, config=config)


def test_flags_of_absl_are_refused_with_what_to_give():
    from absl import flags

    with pytest.raises(TypeError, match=r"FLAGS\.flag_values_dict\(\)"):
        train(1, config=flags.FlagValues())


def test_keys_that_lose_parts_are_numbered():
    config = {"http://a:b@c": 1, "http://d:e@c": 2, object(): 3, object(): 4}
    named = given.as_config(config)
    assert list(named.values()) == [1, 2, 3, 4]
    assert not [name for name in named if "@" in name]


def test_lists_that_have_one_list_many_times_end(monkeypatch):
    monkeypatch.setattr(records, "_MAX_WORK", 10_000)
    bomb = []
    for _ in range(40):
        bomb = [bomb, bomb, {}]
    found = given.as_config({"bomb": bomb, "lr": 0.1})
    assert found["lr"] == 0.1
    assert found.wait(60)
    assert len(str(found)) < 200


class Slow:
    """Another table, whose shape is read from a disk."""

    may_end = threading.Event()

    @property
    def shape(self):
        assert self.may_end.wait(30)
        return 100000, 3


def test_what_takes_long_is_recorded_later_and_is_no_change(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(card, "_CONFIG_SECS", 0.5)
    names = [f"name {i}" for i in range(10**4)]
    config = {"slow": Slow(), "in": {"lr": 0.1, "names": names, "again": [Slow()]}, "small": {"lr": 1}}
    Slow.may_end.clear()
    early = given.as_config(config)
    assert early["slow"] == given.NOT_READY
    names.append("not of this config")
    Slow.may_end.set()
    assert early.wait(30)
    del names[-1]
    again = given.as_config(config)
    assert again.wait(30)
    expected = {**again}
    assert (early, early["slow"], early["in/lr"]) == (expected, "Slow (100000, 3)", 0.1)

    for last_step, ends in ((2, False), (4, True), (6, False)):  # the hook lets it end while the run takes steps
        Slow.may_end.clear()
        hook = jstep.every(2, lambda *_, ends=ends: Slow.may_end.set() if ends else None)
        with caplog.at_level(logging.INFO, "jstep"):
            train(last_step, checkpoint_dir=tmp_path, config=config | {"width": 10 * last_step}, hooks=[hook])
        (run,) = jstep.runs(tmp_path)
        assert run.config == jstep.Saver(tmp_path).extra()["config"]
        assert (run.config == expected | {"width": 10 * last_step}) is ends
        assert (run.config["small/lr"], run.config["width"]) == (1, 10 * last_step)
    Slow.may_end.set()
    lines = [line.strip() for line in caplog.text.splitlines() if "config:" in line]
    assert lines == ["config: width: 20 before, 40 now", "config: width: 40 before, 60 now"]


def test_secrets_of_an_exception_are_not_in_the_timeline(tmp_path):
    def fail(step):
        raise OSError(f"postgres://me:{SECRET}@host/db?password={SECRET} is down, token={SECRET}")

    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    with pytest.raises(OSError, match="is down"):
        jstep.train(train_step, state, fail, 2, checkpoint_dir=tmp_path)
    assert SECRET not in (tmp_path / "timeline.jsonl").read_text()
    (run,) = jstep.runs(tmp_path)
    assert run.reason == "OSError: postgres://host/db is down, token=(not recorded)"


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", SECRET, SECRET),
        ("--password", "x1", "y2"),
        ("--header", "Authorization: Bearer x1"),
        ("-H", "Authorization: x1"),
        ("password=x1 y2",),
        ("+db.password=x1",),
        ("--token", "dGhpc2lzc2VjcmV0dG9rZW4="),
        ("--password", "-x1"),
        ("--cfg", '{"password": "x1"}'),
        ("--x", "headers/Authorization=x1"),
        ("--header=Authorization: Basic x1",),
        ("--url", "mysql://u:x1@h/d?p=y2#y2"),
    ],
    ids=" ".join,
)
def test_secrets_of_a_command_line(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["p.py", *words])
    shown = " ".join(given.command_line())
    assert not [secret for secret in (SECRET, "x1", "y2", "dGhpc2") if secret in shown]


def test_the_command_line(monkeypatch):
    words = ["p.py", "--lr=0.1", f"--api-key={SECRET}", f"token={SECRET}", "--password", "x", "--hf-token", SECRET]
    words += ["--tokenizer", SECRET, "http://a:b@c/d?e=f", "--password", "--verbose", *map(str, range(200))]
    monkeypatch.setattr(sys, "argv", words)
    found = given.command_line()
    assert found[:8] == [
        *("p.py", "--lr=0.1", "--api-key=(not recorded)", "token=(not recorded)"),
        *("--password", "(not recorded)", "--hf-token", "(not recorded)"),
    ]
    assert found[8:13] == ["--tokenizer", SECRET, "http://c/d", "--password", "--verbose"]
    assert found[100:] == ["… and 113 more"]


def test_no_secret_is_below_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["p.py", "--password", SECRET])
    best = jstep.KeepBest(tmp_path / "run" / "best", "loss")
    hook = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[best])
    with caplog.at_level(logging.INFO, "jstep"):
        for width in (1, 2):
            config = {"a": {"password": SECRET + str(width)}, "hf_token": SECRET, "width": width}
            train(2 * width, checkpoint_dir=tmp_path / "run", logdir=tmp_path / "run", hooks=[hook], config=config)
    assert SECRET not in caplog.text
    assert "config: width: 1 before, 2 now" in caplog.text
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) > 5
    assert not [path for path in paths if SECRET.encode() in path.read_bytes()]
    expected = {"a/password": "(not recorded)", "hf_token": "(not recorded)", "width": 1}
    assert jstep.Saver(tmp_path / "run" / "best", prefix="best").extra(2) == {"config": expected, "loss": 1.0}


def test_a_name_of_a_file_that_is_not_utf8_ends_no_run(tmp_path, monkeypatch):
    name = os.fsdecode(b"data-\xff.bin")
    monkeypatch.setattr(sys, "argv", ["p.py", name])
    train(2, checkpoint_dir=tmp_path, logdir=tmp_path, config={"data": name, name: 1})
    (run,) = jstep.runs(tmp_path)
    assert run.config == {"data": r"data-\udcff.bin", r"data-\udcff.bin": 1}
    assert run.starts[-1]["argv"] == ["p.py", r"data-\udcff.bin"]


def lines_of(before, now, tmp_path, caplog, **options):
    for last_step, config in ((2, before), (4, now)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "jstep"):
            train(last_step, checkpoint_dir=tmp_path, config=config, **options)
    return [line.strip() for line in caplog.text.splitlines() if "config:" in line]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (
            {"a": 1, "b": True, "d": "org/data"},
            {"a": 2, "c": 2, "d": "org/other"},
            [
                "config: a: 1 before, 2 now",
                "config: b: true before, absent now",
                "config: c: absent before, 2 now",
                "config: d: org/data before, org/other now",
            ],
        ),
        ({"a": "/x", "password": "x", "steps": 2}, {"a": "/y", "password": "y", "steps": 4}, []),
        (None, {"a": 1}, []),
        ({"a": 1}, None, []),
    ],
    ids=["changed", "a path, a secret, and steps", "none before", "none now"],
)
def test_lines_of_a_restart(before, now, expected, tmp_path, caplog):
    assert lines_of(before, now, tmp_path, caplog) == expected
