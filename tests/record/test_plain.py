"""What a run was given, as JSON: values, configs, and the one rule for secrets."""

import argparse
import collections
import dataclasses
import enum
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jstep.core.secret_text import NOT_RECORDED, error_text, hide
from jstep.record import config as config_module
from jstep.record.config import as_config, command_line, encoded, plain

SECRET = "hunter2-hunter2-hunter2"


@dataclasses.dataclass
class Options:
    lr: float = 0.1
    name: str = "adam"


class Level(enum.IntEnum):
    HIGH = 3


class Raises:
    @property
    def shape(self):
        raise RuntimeError

    def keys(self):
        raise RuntimeError


class Unbound:
    """As a proxy of an object that does not exist yet."""

    __class__ = property(lambda self: 1 / 0)


Pair = collections.namedtuple("Pair", "lr size")
VALUES = [
    (True, True),
    (np.bool_(True), True),
    (jnp.bfloat16(0.5), 0.5),
    (np.float32(0.1), 0.1),
    (np.int64(3), 3),
    (float("nan"), "nan"),
    (pathlib.Path("/a/b"), "/a/b"),
    ((1, "x", None, [2.5]), [1, "x", None, [2.5]]),
    ([{1}, print], ["builtins.set", "builtins.print"]),
    (collections.deque([1, "x"]), [1, "x"]),
    (range(3), [0, 1, 2]),
    (list(range(10**6)), "list (1000000 items), hash fcf52099"),
    (np.ones((2, 3), np.float32), "float32[2, 3]"),
    (Level.HIGH, "HIGH"),
    (np.float32, "numpy.float32"),
    (plain, "jstep.record.config.plain"),
    (Raises(), f"{__name__}.Raises"),
    (Unbound(), f"{__name__}.Unbound"),
    (10**400, "builtins.int"),
    (b"x", "builtins.bytes"),
    (1j, "builtins.complex"),
    ("http://user:pass@host/x", "http://host/x"),
    ("ab" * 2000, "ab" * 500 + "… (4000 characters), hash 8fcbd233"),
    ("\udcff", "?"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=range(len(VALUES)))
def test_values(value, expected):
    found = plain(value, "name")
    assert found == expected
    assert type(found) is type(expected)
    json.dumps(found, allow_nan=False)


def test_names_are_joined():
    config = {
        "a": {"b": Options(), "empty": {}},
        "c": argparse.Namespace(d=1),
        3: Pair(1, 2),
        "raises": Raises(),
        "no": Unbound(),
    }
    expected = {"a/b/lr": 0.1, "a/b/name": "adam", "a/empty": {}, "c/d": 1, "3/lr": 1, "3/size": 2}
    assert as_config(config) == {
        **expected,
        "raises": f"{__name__}.Raises",
        "no": f"{__name__}.Unbound",
    }
    assert as_config(Options()) == {"lr": 0.1, "name": "adam"}
    assert as_config(Pair(1, 2)) == {"lr": 1, "size": 2}
    assert as_config({}) == {}
    assert as_config(None) is None
    config["self"] = config
    assert as_config(config)["a/b/lr"] == 0.1


def test_objects_of_other_libraries():
    attrs, pydantic = pytest.importorskip("attrs"), pytest.importorskip("pydantic")
    made = attrs.make_class("Made", ["lr"])(0.1)
    model = pydantic.create_model("Model", lr=(float, 0.2))()
    assert as_config({"attrs": made, "pydantic": model}) == {"attrs/lr": 0.1, "pydantic/lr": 0.2}


class ConfigDict:
    """As of ml_collections: not a Mapping."""

    def keys(self):
        return ["lr"]

    def __getitem__(self, name):
        return 0.1


def test_what_has_keys_is_a_mapping():
    assert as_config(ConfigDict()) == {"lr": 0.1}


class Counted(dict):
    read = 0

    def keys(self):
        Counted.read += 1
        return super().keys()


def test_there_are_at_most_10000_options_in_half_a_megabyte():
    found = as_config({str(i): Counted(a=1) for i in range(20_000)})
    assert Counted.read <= 10_001, "no more are looked at than are recorded"
    assert (len(found), found["…"]) == (10_001, "more than 10000 options")
    assert len(as_config({str(i): i for i in range(10_000)})) == 10_000
    assert len(json.dumps(as_config({str(i): "x" * 1000 for i in range(9000)}))) < 600_000


class Lazy(dict):
    def __getitem__(self, key):
        return super().__getitem__(key) if key != "bad" else 1 / 0

    def items(self):
        return [(key, self[key]) for key in self]


class Endless(collections.UserList):
    """As a list of OmegaConf: a sequence, of which an item may not resolve."""

    def __getitem__(self, i):
        return self.data[i] if self.data[i] != "???" else 1 / 0


@dataclasses.dataclass
class Later:
    width: int = 64
    vocabulary: int = dataclasses.field(init=False)


def test_a_value_that_raises_takes_no_other_with_it():
    config = {
        "lazy": Lazy(a=1, bad=2),
        "later": Later(),
        "list": Endless([1, "???"]),
        "deep": [{"x": Later()}],
    }
    assert as_config(config) == {
        "lazy/a": 1, "lazy/bad": "builtins.ZeroDivisionError",
        "later/width": 64, "later/vocabulary": "builtins.AttributeError",
        "list": [1, "builtins.ZeroDivisionError"],
        "deep/0/x/width": 64, "deep/0/x/vocabulary": "builtins.AttributeError",
    }  # fmt: skip
    assert as_config(Later()) == {"width": 64, "vocabulary": "builtins.AttributeError"}


def test_lists_of_mappings_have_names():
    data = [{"path": "a", "weight": 0.9}, {"path": "b"}]
    assert as_config({"data": data}) == {
        "data/0/path": "a",
        "data/0/weight": 0.9,
        "data/1/path": "b",
    }
    assert as_config({"a": collections.UserList([1, [Options()]])}) == {
        "a/0": 1, "a/1/0/lr": 0.1, "a/1/0/name": "adam",
    }  # fmt: skip
    circle = [1]
    circle.append(circle)
    assert len(as_config({"a": circle, "b": 2})) == 2
    for config in ([{"a": 1}], [1], "abc", 3):
        with pytest.raises(TypeError, match="must be a mapping"):
            as_config(config)


def test_a_change_behind_a_cut_is_seen():
    for one, other in (("x" * 2000 + "a", "x" * 2000 + "b"), ("x" * 9000 + "a", "x" * 9000 + "b")):
        assert plain(one) != plain(other)
        assert plain(one)[:1000] == plain(other)[:1000] == "x" * 1000
    assert plain([*range(1000), 1]) != plain([*range(1000), 2])


def test_a_long_text_is_cut_before_it_is_searched(monkeypatch):
    searched = []

    def counted_hide(name, text):
        searched.append(len(text))
        return hide(name, text)

    monkeypatch.setattr(config_module, "hide", counted_hide)
    assert plain("a" * 50_000_000).startswith("aaa")
    assert plain("a" * 990 + " hf_" + "a1" * 100).endswith(
        "aaa (not reco… (1194 characters), hash 581ae978"
    )
    assert plain(f"-----BEGIN KEY-----{'x' * 5000}") == NOT_RECORDED
    assert searched
    assert max(searched) <= 2 * config_module.MAX_TEXT


def test_bytes_of_utf_8_are_counted():
    for letter in ("x", "\u63d0", "\U0001f600", "\0"):
        config = {f"prompt{i}": letter * 1000 for i in range(300)} | {"lr": 0.1}
        found = as_config(config)
        size = len(encoded(found))
        assert size < 2**19 + 10_000
        assert found["lr"] == 0.1
        assert ("…" in found) == (len(encoded(config)) > 2**19)
    assert found["…"].startswith("213 options are left out, hash ")
    assert as_config(config | {"prompt299": "y" * 4000})["…"] != found["…"]
    assert json.loads(encoded({"a": "\udcff", "b": float("nan"), "c": [float("inf")]})) == {
        "a": "\udcff", "b": "nan", "c": ["inf"],
    }  # fmt: skip


def test_a_long_command_line_is_cut(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["\U0001f600" * 900] * 50)
    assert command_line() == ["\U0001f600" * 900, "… and 49 more"]


def test_flags_of_absl():
    from absl import flags

    values = flags.FlagValues()
    flags.DEFINE_float("lr", 0.1, "the rate", flag_values=values)
    values(["p.py", "--lr=0.2"])
    assert as_config(values)["lr"] == 0.2
    assert as_config({"flags": values})["flags/lr"] == 0.2


HIDDEN = [
    ("secret", "x"),
    ("db_password", "x"),
    ("dbPassword", "x y"),
    ("DB-PASSWD", "x"),
    ("aws.credentials", "x"),
    ("private-key", "x"),
    ("headers/Authorization", "x"),
    ("auth/password/old", "x"),
    ("api_key", SECRET),
    ("apiKey", "dGhpc2lzc2VjcmV0dG9rZW4="),
    ("hf_token", SECRET),
    ("tokens", SECRET),
    ("token", f"'{SECRET}'"),
    ("token", f" <{SECRET}>.\n"),
    ("APIKEY", SECRET),
    ("x", "hf_" + "a1" * 10),
    ("x", "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"),
    ("x", "sk-proj-abcDEF123_abcDEF123"),
    ("x", "xoxb-123456789012-AbCdEfGhIjKl"),
    ("x", "AKIAIOSFODNNEXAMPLEX"),
    ("x", "Bearer abcdefghij"),
    ("x", "Basic dXNlcjpwYXNz"),
    ("x", "Basic dTpwdw=="),
    ("x", "-----BEGIN PRIVATE KEY-----\nabc"),
]
SHOWN = [
    ("tokenizer", SECRET),
    ("num_tokens", "1024"),
    ("bos_token", "<|begin_of_text|>"),
    ("pad_token", "<pad>"),
    ("sort_key", "validation/accuracy_top1"),
    ("batch_key", "pixel_values_normalized"),
    ("image_key", "image"),
    ("author", SECRET),
    ("keyboard", SECRET),
    ("name", SECRET),
    ("mode", "Basic"),
    ("model", "Basic transformer"),
    ("model", "Basic Transformers v2"),
    ("model", "sk-learn-random-forest"),
    ("model", "sk-learn-random-forest-2"),
    ("model", "hf_question_answering_v2"),
    ("key", "'a b 123456789012345'"),
    ("key", "!" * 100_000),
]


@pytest.mark.parametrize(("name", "text"), HIDDEN)
def test_secrets_are_not_recorded(name, text):
    assert hide(name, text) == NOT_RECORDED
    assert plain([text], name) == [NOT_RECORDED]
    assert as_config({"a": {name: text}}) == {f"a/{name}": NOT_RECORDED}


@pytest.mark.parametrize(("name", "text"), SHOWN)
def test_other_texts_are(name, text):
    assert hide(name, text) == text


def test_numbers_are_no_secrets():
    assert as_config({"max_token": 1024, "secret": None, "password": True}) == {
        "max_token": 1024, "secret": None, "password": True,
    }  # fmt: skip


def test_the_command_line(monkeypatch):
    words = [
        "p.py", "--lr=0.1", f"--api-key={SECRET}", f"token={SECRET}", "--password", "x", "y",
        "--hf-token", SECRET,
    ]  # fmt: skip
    words += ["--tokenizer", SECRET, "http://a:b@c/d?e=f", "--verbose", *map(str, range(200))]
    monkeypatch.setattr(sys, "argv", words)
    hidden = NOT_RECORDED
    found = command_line()
    assert found[:9] == [
        *("p.py", "--lr=0.1", f"--api-key={hidden}", f"token={hidden}"),
        *("--password", hidden, hidden, "--hf-token", hidden),
    ]
    assert found[9:13] == ["--tokenizer", SECRET, "http://c/d?e=f", "--verbose"]
    assert found[100:] == ["… and 113 more"]
    words = [
        "p.py",
        "--api-token",
        "dGhpc2lzYXNlY3JldDEyMw==",
        "--password",
        "a=b",
        "--set",
        "lr=0.1",
        "--password=a=b",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == [
        *(
            "p.py", "--api-token", hidden, "--password", hidden, "--set", "lr=0.1",
            f"--password={hidden}",
        )
    ]  # fmt: skip


def test_messages_of_exceptions():
    error = OSError(
        f"postgres://me:{SECRET}@host/db?password=x is down, "
        f"token={SECRET}, lr=0.1, Bearer {SECRET}"
    )
    hidden = NOT_RECORDED
    assert error_text(error) == (
        f"postgres://host/db?password={hidden} is down, token={hidden}, lr=0.1, {hidden}"
    )
    for text in (
        f"token={SECRET}",
        f"'token={SECRET}'",
        f"token='{SECRET}'",
        f"(token={SECRET})",
        f"token={SECRET}: no",
    ):
        assert SECRET not in error_text(KeyError(text))
        assert "token=" in error_text(ValueError(text))
    assert error_text(ValueError(f"password='a b' {SECRET}")) == f"password={hidden} {SECRET}"

    class UnreadableError(Exception):
        def __str__(self):
            raise ValueError

    assert error_text(UnreadableError()) == ""
    assert error_text(None) == ""
