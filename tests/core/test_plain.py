"""What a run was given, as JSON: values, configs, and the one rule for secrets."""

import argparse
import collections
import dataclasses
import enum
import json
import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jstep.core.secret_text import NOT_RECORDED, error_text, hide
from jstep.record.config import as_config, command_line, plain

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
    ([{"a": 1}, {1}], ["builtins.dict", "builtins.set"]),
    (list(range(10**6)), "list (1000000 items)"),
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
    ("ab" * 2000, "ab" * 500 + "… (4000 characters)"),
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
    assert as_config(config) == {**expected, "raises": f"{__name__}.Raises", "no": f"{__name__}.Unbound"}
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


def test_there_are_at_most_10000_options_in_half_a_megabyte():
    many = {str(i): {"a": 1} for i in range(200_000)}
    began = time.perf_counter()
    found = as_config(many)
    assert time.perf_counter() - began < 1
    assert (len(found), found["…"]) == (10_001, "more than 10000 options")
    assert len(as_config({str(i): i for i in range(10_000)})) == 10_000
    assert len(json.dumps(as_config({str(i): "x" * 1000 for i in range(9000)}))) < 600_000


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
    words = ["p.py", "--lr=0.1", f"--api-key={SECRET}", f"token={SECRET}", "--password", "x", "y", "--hf-token", SECRET]
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
        *("p.py", "--api-token", hidden, "--password", hidden, "--set", "lr=0.1", f"--password={hidden}")
    ]


def test_messages_of_exceptions():
    error = OSError(f"postgres://me:{SECRET}@host/db?password=x is down, token={SECRET}, lr=0.1, Bearer {SECRET}")
    hidden = NOT_RECORDED
    assert error_text(error) == f"postgres://host/db?password={hidden} is down, token={hidden}, lr=0.1, {hidden}"
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
