"""The largest and oddest that a save accepts is read with every check that holds for files of
others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_states import assert_same
from foreign_databases import read_index_of

import jstep
from jstep.array_store import array_reader, array_writer
from jstep.array_store.array_index import MAX_PATH_BYTES
from jstep.array_store.array_writer import OwnParts, merge, write
from jstep.array_store.listing import directory_spec
from jstep.array_store.manifest import CheckpointExtra
from jstep.look.cli import main
from jstep.stores.tagged_json import ExternalBytes
from jstep.stores.untrusted import MAX_MANIFEST_BYTES

DTYPES = [
    "bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "int64", "uint64", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
]  # fmt: skip


def make_state():
    nested = np.ones(2)
    for _ in range(400):
        nested = [nested]
    return {
        "global_step": np.int64(2**63 - 1),
        # Thousands of chunks, each with the fewest bytes, and of the longest paths.
        "x" * (MAX_PATH_BYTES - 1): np.arange(3000, dtype=np.int8),
        "\u6a21" * ((MAX_PATH_BYTES - 2) // 9): np.arange(4000, dtype=np.int8).reshape(40, 100),
        "y" * (MAX_PATH_BYTES - 2): {"": np.ones((1,) * 28 + (4,) * 4, np.int8)},
        "\ud800": {"": {"": np.float32(1)}, "/": np.ones(2)},
        "a\0\n": {"..": np.ones(1), ".": np.ones(2), "c": np.ones(3), "zarr.json": np.ones(4)},
        "$files": {"c": {"0": np.ones(5), "c": np.ones(6)}},
        "dtypes": {
            name: np.ones((2, 3), getattr(ml_dtypes, name, None) or name) for name in DTYPES
        },
        "scalars": {name: np.ones((), getattr(ml_dtypes, name, None) or name) for name in DTYPES},
        "empty": [
            np.zeros((0, 2**57)),
            jnp.zeros((3, 0), jnp.bfloat16),
            np.zeros((1,) * 63 + (0,)),
        ],
        "keys": jax.random.split(jax.random.key(1, impl="unsafe_rbg"), (2, 3)),
        "many": [np.float32(i) for i in range(1000)],
        "nested": nested,
    }


def test_the_largest_and_oddest_that_a_save_accepts(tmp_path, monkeypatch, capsys):
    for module in (array_writer, array_reader):
        monkeypatch.setattr(module, "MAX_CHUNK_BYTES", 1)
    state = make_state()
    values = {"\ud800": ["\u6a21\0", 10**4000, float("inf")], "nested": None}
    for _ in range(97):
        values["nested"] = [values["nested"]]
    files = {"hooks.0": ExternalBytes(b"0"), "position.process_0.0": ExternalBytes(bytes(300))}
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(state, CheckpointExtra(values, files))
        assert_same(saver.restore(state), state)
        assert saver.extra() == values
        assert saver.read_file("position.process_0.0", 2**63 - 1) == bytes(300)
        assert len(jax.tree.leaves(saver.restore(None))) == len(jax.tree.leaves(state))
    assert main(["inspect", path, "--verify"]) == 0
    assert main(["diff", path, path]) == 0


@pytest.mark.thorough
def test_the_largest_extra_that_a_save_accepts(tmp_path):
    extra = "x" * (MAX_MANIFEST_BYTES - 5000)
    with jstep.Saver(tmp_path) as saver:
        saver.save({"global_step": 1}, extra)
        assert saver.extra() == extra
        assert saver.restore({"global_step": 0}) == {"global_step": 1}


def test_the_longest_paths_in_the_databases_of_several_processes(tmp_path):
    """Their smallest entries: references to chunks that are not within the node."""
    base = directory_spec(str(tmp_path))
    name = "x" * (MAX_PATH_BYTES - 1)
    values = np.zeros((10_000, 97), np.int8)
    keys = [f"ocdbt.process_{process}/" for process in range(2)]
    for process, key in enumerate(keys):
        rows = [slice(i, i + 1) for i in range(5000 * process, 5000 * process + 5000)]
        parts = OwnParts(
            name, values.shape, values.dtype, (1, 97), [((row,), values[row]) for row in rows]
        )
        write(
            {**base, "path": base["path"] + key},
            [parts],
            lambda future, _: future.result(),
            first=process == 0,
        )
    merge(base, keys, 10_001, lambda future, _: future.result())
    assert len(read_index_of(tmp_path).values) == 10_001
    assert len(read_index_of(tmp_path / keys[1]).values) == 5000


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            {"a": 1.0, "a/": 2.0},
            "'a' and 'a/' differ only in a slash at the end, and would be stored as one array",
        ),
        ({"": 1.0, "/": 2.0}, "'' and '/' differ only in a slash"),
        (
            {"x" * MAX_PATH_BYTES: 1.0},
            r"the path 'x{50}'… has 1025 bytes in a checkpoint: must be at most 1024",
        ),
        ({"\u6a21" * 114: 1.0}, "has 1027 bytes in a checkpoint"),
        ({"a": np.zeros((0, 2**58), np.int8)}, "'a' has the shape .* even without elements"),
        ({"a": np.ones((1,) * 33)}, "'a': .*Rank 33 is outside valid range"),
        ({"a": np.ones(2, "V8")}, r"'a': .*\|V8 data type is not one of the supported data types"),
        ({"a": np.ones(2, ml_dtypes.int1)}, "'a': .*int1 data type is not one of the supported"),
        (
            {"global_step": np.uint64(2**63)},
            r"global_step is 9223372036854775808: must be below 2\*\*63",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_refused_in_the_callers_thread(tmp_path, leaves, message):
    with jstep.Saver(tmp_path) as saver:
        with pytest.raises((ValueError, jstep.CheckpointError), match=message):
            saver.save({"global_step": 1, **leaves})
        assert saver.all_steps() == []


@pytest.mark.parametrize(
    "names", [("a", "a/"), ("x" * MAX_PATH_BYTES,)], ids=["one array", "a long path"]
)
def test_a_run_refuses_names_before_its_first_step(tmp_path, names):
    optimizer = jstep.gradient_descent(0.1)
    step = jstep.minimize(lambda params, x: sum(params.values()) * x, optimizer)
    state = jstep.TrainState.create(dict.fromkeys(names, 1.0), optimizer)
    with pytest.raises(ValueError, match="state: "):
        jstep.train(
            step, state, lambda step: pytest.fail("a step was taken"), 3, checkpoint_dir=tmp_path
        )
