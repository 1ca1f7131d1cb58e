"""Records of objects: JSON that is bounded and equal in every process, whatever an object's attributes do."""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import sys
import time
import types

import attr
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from processes import python

from jstep.core import records
from jstep.core.records import Fields, Recorder, json_float, record_value, references, sort_sets
from jstep.loop.given import as_config

LONG = "hunter2-hunter2-hunter2"


class Table:
    shape, dtype = (100000, 3), np.dtype("float32")

    def keys(self):
        raise SystemExit

    __getitem__ = __len__ = __iter__ = __getattr__ = keys


class NoAttributes:
    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError


class Large(collections.abc.Mapping):
    def __len__(self):
        return 10**6

    def __iter__(self):
        raise RuntimeError

    def __getitem__(self, key):
        raise RuntimeError


class Endless(Large):
    def __len__(self):
        raise RuntimeError

    def keys(self):
        return iter(int, 1)


class Shown:
    names = frozenset("abcdefgh")

    def __repr__(self):
        return f"Shown({set(self.names)}, token='{LONG}', at={hex(id(self))})"


def function():
    pass


VALUES = [
    (np.float32, "numpy.float32"),
    (jnp.float32, "jax.numpy.float32"),
    (float, "float"),
    (os, "os"),
    (function, "test_recorded_values.function"),
    ("".join, "str.join"),
    (Table(), "Table float32 (100000, 3)"),
    (type("DataFrame", (), {"shape": property(lambda self: (100000, 3))})(), "DataFrame (100000, 3)"),
    (types.SimpleNamespace(shape="round"), "namespace(shape='round')"),
    (NoAttributes(), "NoAttributes"),
    ([NoAttributes(), {1: NoAttributes()}], None),
    (Shown(), "Shown({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}, token=(not recorded), at=0x)"),
    (functools.partial(function, 1, names={"b", "a"}, password="x"),
     'partial(test_recorded_values.function, 1, names=["a", "b"], password="(not recorded)")'),
    (types.SimpleNamespace(names={"b", "a"}), "namespace(names={'a', 'b'})"),
    ({frozenset("ab"), frozenset("c")}, [["a", "b"], ["c"]]),
    (np.float32(0.1), 0.1),
    (np.longdouble(0.5), 0.5),
    (10**5000, None),
    (2**70, 2**70),
    (jax.random.key(5), "key<fry> [0, 5]"),
    (np.dtype("int8"), "dtype('int8')"),
    (range(10**9), "range (1000000000 entries)"),
    (b"x" * 2000, None),
    (1j, "1j"),
    ([pathlib.Path("/a"), None, float("-inf")], ["/a", None, "-inf"]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=[f"{i}" for i in range(len(VALUES))])
def test_values(value, expected):
    found = record_value("name", value)
    assert expected in (None, found)
    assert len(json.dumps(found, allow_nan=False)) < 1100


def options(value):
    return dict(Recorder().options("x", references(value, float("inf"))))


@attr.define
class Attrs:
    lr: float = 0.1
    inner: object = None


class StructMeta(type):  # as that of msgspec
    __struct_fields__ = property(lambda cls: ("a", "gone"))


class Struct(metaclass=StructMeta):
    __slots__ = "a", "gone"

    def __init__(self):
        self.a = 1


@dataclasses.dataclass
class Data:
    a: int
    password: str = "x"


def test_names_of_files_that_are_not_utf8_are_escaped():
    name = os.fsdecode(b"data-\xff.bin")
    config = {"path": pathlib.Path(name), "files": [name], name: 1, "long": name * 3000}
    recorded = as_config(config)
    assert recorded["path"] == recorded["files"][0] == r"data-\udcff.bin"
    assert recorded[r"data-\udcff.bin"] == 1
    for text in (*recorded, recorded["long"]):
        assert text.encode()


def test_names_of_fields():
    assert options(Attrs(inner=Attrs())) == {"x/lr": 0.1, "x/inner/lr": 0.1, "x/inner/inner": None}
    assert options(Struct()) == {"x/a": 1, "x/gone": None}
    assert options(object.__new__(Data)) == {"x/a": None, "x/password": "(not recorded)"}
    assert options([Data(1), 2]) == {"x/0/a": 1, "x/0/password": "(not recorded)", "x/1": 2}
    assert options({"https://a:b@c/d": 1, ("y", 2): 2}) == {"x/https://c/d": 1, "x/('y', 2)": 2}


@pytest.mark.parametrize(
    "value", [Large(), Endless(), {i: i for i in range(1001)}, [{"a": 1}] * 1001, [{0: [{}]}] * 1001]
)
def test_large_values_are_one_option(value):
    ((name, text),) = options(value).items()
    assert name == "x"
    assert text.startswith(type(value).__name__)
    assert "entries" in text


def test_hashes_follow_the_contents_and_not_the_order():
    numbers = {f"{i}": [i] for i in range(2000)}
    assert options(numbers) == options(dict(reversed(numbers.items())))
    assert options(numbers) != options(numbers | {"5": [6]})
    assert options({"a": {str(i): {str(j): j for j in range(40)} for i in range(40)}})["x/a"].startswith(
        "dict (40 entries"
    )
    names = [f"a={i}" for i in range(3000)]
    assert record_value("x", names) != record_value("x", [*names[:-1], "a=0"])


def test_values_inside_of_themselves_and_deep_values_end(monkeypatch):
    monkeypatch.setattr(records, "_MAX_WORK", 10_000)
    bomb, deep, circle = [], {}, {}
    for _ in range(100):
        bomb, deep = [bomb, bomb], {"a": deep, "b": deep}
    circle["a"] = [circle]
    for value in (bomb, deep, circle):
        copied = references(value, time.monotonic() + 0.01)
        assert len(json.dumps(list(Recorder().options("x", copied)))) < 10**6


def test_references_do_not_change_with_the_value():
    config = {"a": [1, [2]], "b": Data(1)}
    copied = references(config, float("inf"))
    config["a"][1].append(3)
    config["b"].a = 2
    config["c"] = 4
    assert type(copied) is Fields
    assert dict(Recorder().options("x", copied)) == {"x/a": [1, [2]], "x/b/a": 1, "x/b/password": "(not recorded)"}


def test_what_is_shown_of_a_large_set_has_no_secrets():
    urls = {f"http://me:{LONG}@host/{i}" for i in range(3000)} | {("x",) * 3000}
    assert LONG not in record_value("x", urls)
    assert LONG not in record_value("x", sorted(urls - {("x",) * 3000}))


def test_sets_are_sorted_in_texts():
    text = "f({'b', 'a'}, {'k': [2, 1]}, '{b, a}', {{2}, {1}})"
    assert sort_sets(text) == "f({'a', 'b'}, {'k': [2, 1]}, '{b, a}', {{1}, {2}})"
    assert sort_sets("}{'a") == "}{'a"
    assert [json_float(value) for value in (0.5, float("nan"), np.float32("inf"))] == [0.5, "nan", "inf"]


# Any object, with any attributes, is recorded, and equally in every process.

HOSTILE = [Table, Large, Endless, Shown]  # hypothesis itself reads the attributes of NoAttributes
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), st.binary(max_size=5),
    st.sampled_from([np.float32, function, os, jnp.float32(0.1), np.arange(3), "postgres://a:b@c?d"]),
)  # fmt: skip
VALUES_OF_ALL_KINDS = st.recursive(
    st.one_of(SCALARS, st.sampled_from(HOSTILE).map(lambda kind: kind())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=4),
        inner.map(Attrs),
        inner.map(lambda value: functools.partial(function, value, x=value)),
        inner.map(lambda value: types.SimpleNamespace(value=value)),
        st.frozensets(st.text(max_size=4), max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.thorough
@settings(max_examples=400, deadline=None)
@given(VALUES_OF_ALL_KINDS, st.text(max_size=10))
def test_any_value_is_recorded(value, name):
    found = dict(Recorder().options(name, references(value, float("inf"))))
    assert len(json.dumps(found, allow_nan=False)) < 10**5
    assert json.dumps(found) == json.dumps(dict(Recorder().options(name, value)))
    assert len(json.dumps(record_value(name, value), allow_nan=False)) < 7000


def nested(random, depth=0):
    """Return a value with sets, of objects that are equal in every process."""
    kind = random.choice(["set", "dict", "list", "partial", "shown", "text", "namespace"][4 * (depth > 3) :])
    if kind == "set":
        return {random.choice("abcdefghij") * random.randrange(1, 4) for _ in range(5)}
    if kind == "dict":
        return {str(i): nested(random, depth + 1) for i in range(3)}
    if kind == "list":
        return [nested(random, depth + 1) for _ in range(3)]
    if kind == "partial":
        return functools.partial(function, nested(random, depth + 1), x=nested(random, depth + 1))
    return {"shown": Shown(), "text": "x", "namespace": types.SimpleNamespace(a={"q", "r", "s"}, b={1: {"t", "u"}})}[
        kind
    ]


def of_nested():
    source = random.Random(0)
    return json.dumps([options(nested(source)) for _ in range(30)])


@pytest.mark.thorough
def test_recorded_values_are_equal_in_every_process():
    here = str(pathlib.Path(__file__).parent)
    code = "import sys, json; sys.path[:0] = sys.argv[1:]; import test_recorded_values as t; print(t.of_nested())"
    found = [python("-c", code, here, *sys.path, PYTHONHASHSEED=str(seed)).splitlines()[-1] for seed in (1, 2)]
    assert found[0] == found[1] == of_nested()
