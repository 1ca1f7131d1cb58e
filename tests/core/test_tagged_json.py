"""Tagged JSON: values that JSON lacks are decoded as they were, and nothing else is ever built."""

import collections
import json
import random
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jstep
from jstep.core.tagged_json import UnsupportedError, as_json, copied, decode


def encode(value):
    return as_json(copied(value))


def round_trip(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True, {"b": []}]}, {"a": (1,)}, {1: 2}, b"\x00\xff", {"a": b"\x00"}, (), [()],
        {"\ud800": 1}, {"n": 10**3000}, {"n": -(2**70)}, {None: 1}, {(1, b"x"): {}, "1": 0, 1: 1},
        {"a": float("inf")}, float("nan"), -0.0, "x", 1 + 2j, complex("nan-infj"), {3, 1}, frozenset({(1,)}),
        set(),
        {"$tuple": [1]}, {"$": {"$set": 2}}, {"$a": 1, "b": 2}, bytearray(b"ab"), [True, 1, 2**63], (None, "a"),
        collections.OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2},
        np.float64(0.5), np.float32("nan"), np.str_(""), np.bytes_(b"x"), np.bool_(True), np.datetime64("2026-11-22"),
        np.int64(3), ml_dtypes.bfloat16(2), np.zeros(1, [("a", "i4")])[0],
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_values_survive(value):
    found = round_trip(value)
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_long_integers_survive():
    assert round_trip([10**5000, -(10**5000)]) == [10**5000, -(10**5000)]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3)[:, ::2], np.asfortranarray(np.ones((2, 3), ">f4")), np.array("abc"),
        np.zeros((0, 3)),
        np.array([b"x", b""]), np.array(["2026"], "M8[D]"), np.array([True]), np.array(-0.0),
        np.ones(3, ml_dtypes.int4), np.ones(3, ml_dtypes.bfloat16), np.zeros((2, 0), ml_dtypes.float8_e4m3fn),
        np.zeros(2, "V3"),
        np.zeros(2, [("a", "i4"), ("b", "f8", (2,))]), np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)  # fmt: skip
def test_arrays_survive(array):
    found = round_trip([array])[0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert found.flags.writeable
    assert found.flags.aligned


BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BITS)
def test_generators_of_numpy_continue(bits):
    generator = np.random.Generator(bits(3))
    generator.random(700)
    generator.integers(9, dtype=np.uint32)
    generator.spawn(1)
    found, state = round_trip({"rng": generator})["rng"], np.random.RandomState(bits(3))
    assert np.array_equal(
        found.integers(99, size=700, dtype=np.uint32), generator.integers(99, size=700, dtype=np.uint32)
    )
    assert found.spawn(1)[0].random() == generator.spawn(1)[0].random()
    state.randn(3)
    assert np.array_equal(round_trip(state).randn(700), state.randn(700))
    assert round_trip(bits(3)).state["bit_generator"] == bits.__name__


def test_generators_of_python_continue():
    generator = random.Random(3)
    generator.gauss()
    state = round_trip(generator.getstate())
    assert state == generator.getstate()
    assert round_trip(generator).gauss() == generator.gauss()


def test_tensors_survive():
    torch = pytest.importorskip("torch")
    kinds = ["float32", "bfloat16", "float16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]
    for dtype in [getattr(torch, name) for name in kinds]:
        for shape in [(), (3,), (0, 2), (3, 2)]:
            tensor = torch.ones(shape).to(dtype)
            tensor = tensor.t() if len(shape) == 2 else tensor
            found = round_trip({"x": tensor})["x"]
            assert (found.dtype, found.shape, repr(found)) == (dtype, tensor.shape, repr(tensor))
    for refused in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.Generator(), torch.float32):
        with pytest.raises(UnsupportedError, match="torch"):
            encode(refused)
    with pytest.raises(ValueError, match=r"torch\.dtype"):
        decode({"$tensor": {"dtype": "load", "shape": [], "data": {"$bytes": ""}}})


def test_nothing_is_shared_with_the_value():
    value = {"a": [[1], (2,), np.zeros(2)]}
    encoded = encode(value)
    value["a"][0].append(3)
    value["a"][2][0] = 9
    value["b"] = 1
    assert repr(decode(encoded)) == "{'a': [[1], (2,), array([0., 0.])]}"


def test_equal_sets_are_equal_json():
    names = [f"shard-{n}" for n in range(20)]
    assert json.dumps(encode(set(names))) == json.dumps(encode({*reversed(names)}))


Named = collections.namedtuple("Named", "a")


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, (threading.Lock(),)]}, r"^\['a'\]\[1\]\[0\] is a value of type _thread.lock"),
        ({(1,): {2: len}}, r"^\[\(1,\)\]\[2\] is a value of type builtins.builtin_function"),
        ({Named(1): 1}, r"^\['key'\] is a value of type test_tagged_json.Named"),
        ({1, Named(1)}, r"^\['element'\] is a value of type test_tagged_json.Named"),
        (Text("a"), "^is a value of type test_tagged_json.Text"),
        ([np.array([None])], r"^\[0\] is a NumPy array of dtype object"),
        (np.zeros(1, [("a", "O")]), "NumPy array of dtype"),
        (np.array(["a"], np.dtypes.StringDType()), "NumPy array of dtype StringDType"),
        (np.ma.ones(2), "MaskedArray"),
        (np.zeros(2, "V0"), r"dtype \|V0, whose elements have no bytes"),
        (np.void(b""), "whose elements have no bytes"),
        (jnp.ones(2), "ArrayImpl"),
        (collections.deque([1]), "collections.deque"),
        (int, "builtins.type"),
    ],
)
def test_other_values_are_refused_with_their_path(value, message):
    with pytest.raises(UnsupportedError, match=message):
        encode(value)


def test_depth_is_limited_to_what_a_checkpoint_accepts(tmp_path):
    recursive = {}
    recursive["self"] = recursive
    deepest = 0
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}):
        value, depth = wrap(0), 1
        while True:
            try:
                encoded = encode(value)
            except UnsupportedError:
                break
            assert repr(round_trip(value)) == repr(value)
            value, depth, saved = wrap(value), depth + 1, encoded
        deepest = max(deepest, depth)
        with jstep.Saver(tmp_path, max_to_keep=1) as saver:
            positions = {"batches_of_processes": {"positions": [{"value": saved}]}}
            saver.save(jstep.TrainState.create({}, jstep.gradient_descent(0.1)), extra=positions)
            assert saver.extra() == positions
    assert deepest > 50
    with pytest.raises(UnsupportedError, match="nested too deeply, or contains itself") as error:
        encode(recursive)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        '{"$new": 1}',
        '{"$tuple": 3}', '{"$set": [[1]]}', '{"$dict": [[{"a": 1}, 2]]}', '{"$dict": [1]}', '{"$int": 3}',
        '{"$float": []}', '{"$complex": "ab"}', '{"$bytes": "?"}', '{"$bytes": null}',
        '{"$array": []}', '{"$array": {}}',
        '{"$array": {"dtype": "O", "shape": [1], "data": {"$bytes": "AAAAAAAAAAA="}}}',
        '{"$array": {"dtype": "f4", "shape": [1099511627776], "data": {"$bytes": ""}}}',
        '{"$array": {"dtype": "f4", "shape": [-1], "data": {"$bytes": ""}}}',
        '{"$array": {"dtype": "f4", "shape": [true], "data": {"$bytes": "AAAAAA=="}}}',
        '{"$array": {"dtype": "f4", "shape": [2], "data": {"$bytes": "AAAAAA=="}}}',
        '{"$array": {"dtype": "U0", "shape": [1000000], "data": {"$bytes": ""}}}',
        '{"$array": {"dtype": "V0", "shape": [2], "data": {"$bytes": ""}}}',
        '{"$scalar": {"dtype": [[1]], "shape": [], "data": 1}}', '{"$generator": 1}',
        '{"$bit_generator": {}}',
        '{"$bit_generator": {"state": {"bit_generator": "default_rng"}, "seed": null}}',
        '{"$random": [1]}',
        '{"$seed_sequence": {"entropy": 1, "spawn_key": [], "pool_size": 1000000, "n_children_spawned": 0}}',
        '{"$random_state": {}}',
    ],
)  # fmt: skip
def test_what_was_not_encoded_is_refused(text):
    with pytest.raises(ValueError, match=r"^the tag '\$new' is not known|^\$[a-z_]+: "):
        decode({"a": [json.loads(text)]})


@pytest.mark.parametrize(("bits", "at"), [(np.random.MT19937, 625), (np.random.MT19937, -1), (np.random.Philox, 5)])
def test_a_generator_cannot_read_outside_its_buffer(bits, at):
    encoded = encode(bits(3))
    state = encoded["$bit_generator"]["state"]
    if bits is np.random.Philox:
        state["buffer_pos"] = at
    else:
        state["state"]["pos"] = at
    with pytest.raises(ValueError, match="pos must be from 0"):
        decode(encoded)
