"""Tagged JSON: values that JSON lacks are decoded as they were, and nothing else is ever built."""

import collections
import json
import pathlib
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jstep
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import LARGE, UnsupportedError
from jstep.stores.tagged_json import (
    AttachedFiles,
    ExternalBytes,
    as_json,
    copy_encodable,
    decode,
    encoded_size,
    resolve_files,
    set_generator,
)

NOT_ENCODED = pathlib.Path(__file__).with_name("not_encoded.jsonl")
"""Values with tags that no value is encoded to, one a line."""


def encode(value):
    return as_json(copy_encodable(value))


def round_trip(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True, {"b": []}]}, {"a": (1,)}, {1: 2}, b"\x00\xff",
        {"a": b"\x00"}, (), [()],
        {"\ud800": 1}, {"n": 10**3000}, {"n": -(2**70)}, {None: 1}, {(1, b"x"): {}, "1": 0, 1: 1},
        {"a": float("inf")}, float("nan"), -0.0, "x",
        {"$tuple": [1]}, {"$": {"$set": 2}}, {"$a": 1, "b": 2}, [True, 1, 2**63], (None, "a"),
        collections.OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2},
        np.float64(0.5), np.float32("nan"), np.str_(""), np.bytes_(b"x"), np.bool_(True),
        np.datetime64("2026-11-22"), np.int64(3), ml_dtypes.bfloat16(2),
        np.zeros(1, [("a", "i4")])[0],
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
        np.arange(6).reshape(2, 3)[:, ::2], np.asfortranarray(np.ones((2, 3), ">f4")),
        np.array("abc"), np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1),
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0)[::-1, ::2],
        np.zeros((3, 1, 2)).T, np.zeros((2, 3), "U2").T,
        np.zeros((0, 3)),
        np.array([b"x", b""]), np.array(["2026"], "M8[D]"), np.array([True]), np.array(-0.0),
        np.ones(3, ml_dtypes.int4), np.ones(3, ml_dtypes.bfloat16),
        np.zeros((2, 0), ml_dtypes.float8_e4m3fn), np.zeros(2, "V3"),
        np.zeros(2, "m8[25s]"), np.zeros(2, "M8"), np.zeros(0, "U0"), np.ones(2, np.longdouble),
        np.ones(2, "c16"), np.zeros(2, [(("title", "a"), "u2"), ("b", [("c", ">i8")], (2, 1))]),
        np.ones(2, ml_dtypes.float8_e4m3b11fnuz), np.zeros(2, [("a", "i4"), ("b", "f8", (2,))]),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)  # fmt: skip
def test_arrays_survive(array):
    found = round_trip([array])[0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    for name in array.dtype.names or [...]:  # the bytes between the fields of a record are anything
        assert found[name].tobytes() == array[name].tobytes()
    assert found.flags.writeable
    assert found.flags.aligned
    assert found.strides == array.copy(order="K").strides


def test_the_order_of_axes_in_memory_is_kept():
    """Sums are rounded by it; broadcasting is not kept, and sums as if each element had its own
    memory."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(7, 11, 13)).astype(np.float32).transpose(axes)
        for axes in [(0, 2, 1), (1, 2, 0)]
    ]
    arrays += [
        np.asfortranarray(rng.normal(size=(37, 53)))[:, ::-2],
        np.broadcast_to(rng.normal(size=(1, 53)), (37, 53)),
    ]
    arrays += [np.asfortranarray(rng.normal(size=(LARGE, 3)))]  # in a file
    files = AttachedFiles("position.")
    encoded = resolve_files(as_json(copy_encodable(arrays), files), lambda name: files[name])
    assert len(files) == 1
    for array, found in zip(arrays, decode(encoded), strict=True):
        np.testing.assert_array_equal(array, found)
        for axis in (None, 0, 1):
            assert array.sum(axis).tobytes() == found.sum(axis).tobytes()


BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BITS)
def test_generators_of_numpy_continue(bits):
    generator = np.random.Generator(bits(3))
    generator.random(700)
    generator.integers(9, dtype=np.uint32)
    generator.spawn(1)
    found, state = round_trip({"rng": generator})["rng"], np.random.RandomState(bits(3))
    assert np.array_equal(
        found.integers(99, size=700, dtype=np.uint32),
        generator.integers(99, size=700, dtype=np.uint32),
    )
    set_in_place = np.random.Generator(bits(4))
    set_generator(set_in_place, found)
    spawned = [rng.spawn(1)[0].random() for rng in (found, generator, set_in_place)]
    assert len(set(spawned)) == 1
    assert set_in_place.random() == found.random()
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
    kinds = [
        "float32", "bfloat16", "float16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn",
    ]  # fmt: skip
    for dtype in [getattr(torch, name) for name in kinds]:
        for shape in [(), (3,), (0, 2), (3, 2)]:
            tensor = torch.ones(shape).to(dtype)
            tensor = tensor.t() if len(shape) == 2 else tensor
            found = round_trip({"x": tensor})["x"]
            assert (found.dtype, found.shape, repr(found)) == (dtype, tensor.shape, repr(tensor))
            if tensor.numel():  # the strides of an empty tensor address nothing
                assert found.stride() == tensor.stride()
    for refused in (
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.Generator(),
        torch.float32,
    ):
        with pytest.raises(UnsupportedError, match="torch"):
            encode(refused)
    with pytest.raises(ValueError, match=r"torch\.dtype"):
        decode({"$tensor": {"dtype": "load", "shape": [], "data": {"$bytes": ""}}})


def test_the_json_is_that_of_earlier_versions():
    """Checkpoints hold it."""
    value = {
        "plain": [1, 2.5, "x", None, True], "tuple": (1, (2.5,)),
        "keys": {1: 2, "b": None}, "tag": {"$a": 1},
        "ordered": collections.OrderedDict(b=1), "bytes": b"\x00\xff",
        "int": 2**70, "floats": [float("nan"), float("-inf")],
        "array": np.array([[1, 2]], ">i2"), "fields": np.zeros(1, [("a", "i1")]),
        "scalar": np.float32(0.5), "jax": jnp.ones(2, jnp.bfloat16),
        "weak": jnp.asarray(2.0), "key": jax.random.key(1),
    }  # fmt: skip

    def array(dtype, shape, text):
        return {"dtype": dtype, "shape": shape, "data": {"$bytes": text}}

    def of_jax(array, impl=None, weak=False):
        return {"$jax": {"data": {"$array": array}, "impl": impl, "weak": weak}}

    expected = {
        "plain": [1, 2.5, "x", None, True], "tuple": {"$tuple": [1, {"$tuple": [2.5]}]},
        "keys": {"$dict": [[1, 2], ["b", None]]}, "tag": {"$dict": [["$a", 1]]},
        "ordered": {"$ordered_dict": [["b", 1]]}, "bytes": {"$bytes": "AP8="},
        "int": 2**70, "floats": [{"$float": "nan"}, {"$float": "-inf"}],
        "array": {"$array": array(">i2", [1, 2], "AAEAAg==")},
        "fields": {"$array": array([{"$tuple": ["a", "|i1"]}], [1], "AA==")},
        "scalar": {"$scalar": array("<f4", [], "AAAAPw==")},
        "jax": of_jax(array("bfloat16", [2], "gD+APw==")),
        "weak": of_jax(array("<f4", [], "AAAAQA=="), weak=True),
        "key": of_jax(array("<u4", [2], "AAAAAAEAAAA="), impl="threefry2x32"),
    }  # fmt: skip
    assert encode(value) == expected


@pytest.mark.parametrize("value", [{1}, frozenset({1}), 1j, bytearray(b"a")], ids=str)
def test_values_that_are_not_encoded(value):
    with pytest.raises(UnsupportedError, match=type(value).__name__):
        encode(value)


def test_depth_is_limited_to_what_a_checkpoint_accepts(tmp_path):
    recursive = {}
    recursive["self"] = recursive
    depths = []
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}):
        value, depth = wrap(0), 1
        while True:
            try:
                encoded = encode(value)
            except UnsupportedError:
                break
            assert repr(round_trip(value)) == repr(value)
            value, depth, saved = wrap(value), depth + 1, encoded
        depths.append(depth)
        with jstep.Saver(tmp_path, max_to_keep=1) as saver:
            positions = {"batches_of_processes": {"positions": [{"value": saved}]}}
            saver.save(jstep.TrainState.create({}, jstep.gradient_descent(0.1)), extra=positions)
            assert saver.extra() == positions
    assert depths == [82, 42, 28]
    with pytest.raises(UnsupportedError, match="nested too deeply, or contains itself") as error:
        encode(recursive)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("text", NOT_ENCODED.read_text(encoding="utf-8").splitlines())
def test_what_was_not_encoded_is_refused(text):
    with pytest.raises(
        ValueError,
        match=r"^the tag '\$(new|same|aliased|view|file)' is not known|^\$[a-z_]+: ",
    ):
        decode({"a": [json.loads(text)]})


@pytest.mark.parametrize(
    ("bits", "at"), [(np.random.MT19937, 625), (np.random.MT19937, -1), (np.random.Philox, 5)]
)
def test_a_generator_cannot_read_outside_its_buffer(bits, at):
    encoded = encode(bits(3))
    state = encoded["$bit_generator"]["state"]
    if bits is np.random.Philox:
        state["buffer_pos"] = at
    else:
        state["state"]["pos"] = at
    with pytest.raises(ValueError, match="pos must be from 0"):
        decode(encoded)


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.MT19937, np.random.RandomState, random.Random]
)
def test_a_generator_is_in_one_place(make):
    one = make(1)
    with pytest.raises(UnsupportedError, match=r"^\['b'\]\[0\] is a \w+ that is in several places"):
        encode({"a": one, "b": [one]})
    shared = [1]
    assert round_trip([shared, shared, make(1), make(1)])[:2] == [[1], [1]]


# Arrays and keys of JAX.


@pytest.mark.parametrize(
    "value",
    [
        jnp.arange(6).reshape(2, 3), jnp.ones(2, jnp.bfloat16), jnp.asarray(1.5), jnp.asarray(2),
        jnp.zeros((0, 2)), jnp.broadcast_to(jnp.asarray(0.1), (2, 2)), jnp.zeros(LARGE // 4 + 1),
        jax.random.PRNGKey(0),
    ],
    ids=range(8),
)  # fmt: skip
def test_arrays_of_jax_survive(value):
    (found,) = round_trip([value])
    assert isinstance(found, jax.Array)
    assert (found.dtype, found.shape, found.weak_type) == (
        value.dtype,
        value.shape,
        value.weak_type,
    )
    np.testing.assert_array_equal(found, value)
    assert decode(copy_encodable(value)).dtype == value.dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_survive(impl):
    key = jax.random.key(3, impl=impl)
    found, several = round_trip((key, jax.random.split(key, 3)))
    assert (found.dtype, several.shape) == (key.dtype, (3,))
    np.testing.assert_array_equal(jax.random.normal(found, 2), jax.random.normal(key, 2))
    np.testing.assert_array_equal(
        jax.random.key_data(several), jax.random.key_data(jax.random.split(key, 3))
    )


def test_a_copy_outlives_an_array_that_is_donated():
    array = jnp.arange(4.0)
    copy = copy_encodable({"a": array})
    array.delete()
    np.testing.assert_array_equal(decode(as_json(copy))["a"], np.arange(4.0))
    with pytest.raises(
        UnsupportedError,
        match=r"^\['a'\] is a JAX array that is traced, was donated, or has parts",
    ):
        copy_encodable({"a": array})
    with pytest.raises(UnsupportedError, match="traced"):
        jax.eval_shape(lambda x: copy_encodable([x]), 1.0)


def test_an_array_of_64_bits_is_not_truncated():
    with jax.enable_x64(True):
        encoded = encode(jnp.asarray(0.1, jnp.float64))
        assert decode(encoded).dtype == np.float64
    with pytest.raises(ValueError, match="jax_enable_x64"):
        decode(encoded)


# Large arrays, which are files.


def test_large_arrays_are_files():
    block = np.arange(LARGE, dtype=np.float32)
    value = {"a": block, "b": [b"x" * (LARGE + 1)], "c": jnp.ones(LARGE), "d": block[:9].copy()}
    files = AttachedFiles("position.")
    encoded = json.loads(json.dumps(as_json(copy_encodable(value), files)))
    assert len(json.dumps(encoded)) < 2000
    assert [len(one.read()) for one in files.values()] == [4 * LARGE, LARGE + 1, 4 * LARGE]
    assert [*files] == ["position.0", "position.1", "position.2"]

    linked = resolve_files(encoded, lambda name: ExternalBytes(load=files[name].read))
    for found in (decode(linked), decode(as_json(linked)), decode(copy_encodable(value))):
        np.testing.assert_array_equal(found["a"], block)
        assert (found["b"][0], found["c"].shape, found["d"].shape) == (
            value["b"][0],
            (LARGE,),
            (9,),
        )
    again = AttachedFiles("position.")
    assert as_json(linked, again) == encoded
    assert again == files
    with pytest.raises(ValueError, match=r"the tag '\$file' is not known"):
        decode(encoded)


def test_the_limit_is_64_kb():
    for size, number in ((LARGE, 0), (LARGE + 1, 1)):
        files = AttachedFiles("position.")
        as_json(copy_encodable([np.zeros(size, np.uint8), bytes(size)]), files)
        assert len(files) == 2 * number


def test_sizes_are_those_of_arrays_bytes_and_lists():
    sizes = {
        b"abc" * 50: 150,
        "abc" * 50: 150,
        1: 8,
        (1,) * 99: 792,
        (b"a" * 99, (b"b" * 99,)): 198,
    }
    assert {value: encoded_size(copy_encodable(value)) for value in sizes} == sizes
    assert encoded_size(ExternalBytes(b"a")) > LARGE
    for size in (10, 10**5):
        for value in (
            np.zeros(size, np.uint8),
            jnp.zeros(size, jnp.uint8),
            [0] * (size // 8),
            {"a": bytes(size)},
        ):
            assert (encoded_size(copy_encodable([value])) > LARGE) == (size > LARGE)


def test_large_bytes_that_were_written_are_compared_by_their_hash():
    one, two = ExternalBytes(b"a" * 9), ExternalBytes(b"a" * 9)
    assert one == two != ExternalBytes(b"a")
    one.written()
    assert one == two
    with pytest.raises(RuntimeError, match="not kept in memory"):
        one.read()
    one.load = lambda: b"a" * 9
    assert one.read() == two.read()


@pytest.mark.parametrize(
    "value",
    [
        np.ones((2, 3)).T,
        jnp.ones(2),
        np.float32(1),
        np.random.default_rng(0),
        np.random.SeedSequence(1),
    ],
    ids=["array", "jax", "scalar", "generator", "seed"],
)
def test_a_part_that_is_not_known_is_refused(value):
    """It may change the meaning of the others, as `axes` did."""
    ((tag, parts),) = tagged_json.as_json(tagged_json.copy_encodable(value)).items()
    inner = parts if "$" not in next(iter(parts)) else next(iter(parts.values()))
    inner["order"] = [0]
    with pytest.raises(ValueError, match="order"):
        tagged_json.decode({tag: parts})
