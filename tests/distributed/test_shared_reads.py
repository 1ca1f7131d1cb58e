"""Several processes that restore read each byte once, and send it to those that need it."""

import jax
import numpy as np
import pytest
from processes import printed, run

from jstep.array_store import shared_reads
from jstep.array_store.array_reader import ArrayKind
from jstep.array_store.shared_reads import _received, _SharedArray

RESTORE = """
import hashlib
from jstep.array_store import array_reader, shared_reads
shared_reads._ROUND_BYTES = shared_reads._MIN_ROUND_BYTES * count  # several rounds
mesh = jax.make_mesh((2, 4), ("replica", "model"))
spec_of = {"whole": P(), "model": P("model"), "both": P(("replica", "model")), "replica": P("replica")}
spec_of["second"] = P(None, "model")
draw = np.random.default_rng(0)

def put(values, spec):
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

expected = {"global_step": np.int32(3)}
specs = {"global_step": P()}
for kind, spec in spec_of.items():
    for shape in ((8, 4), (16, 12), (64, 40), (80, 4000)):
        name = f"{kind} {shape}"
        dtype = [np.float32, np.int8, np.int16][len(expected) % 3]
        expected[name] = draw.integers(-100, 100, shape).astype(dtype)
        specs[name] = spec
state = {name: put(values, specs[name]) for name, values in expected.items()}
state["scalar"] = put(np.float32(7), P())
expected["scalar"] = np.float32(7)
with jstep.Saver(directory) as saver:
    saver.save(state)
    saver.wait()
    read = []
    begin = array_reader.ArrayReader._begin
    def counted(self, name, kind, memory, *others):
        read.extend((name, box, values.nbytes) for box, values in memory.items())
        return begin(self, name, kind, memory, *others)
    array_reader.ArrayReader._begin = counted
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for name in expected:
        if "(16, 12)" in name:
            target[name] = np.zeros_like(expected[name])
    restored = saver.restore(target)
    for name, leaf in restored.items():
        if isinstance(leaf, np.ndarray):
            np.testing.assert_array_equal(leaf, expected[name], name)
            continue
        assert leaf.sharding == state[name].sharding
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[name][shard.index], name)
    print("read", sum(nbytes for _, _, nbytes in read))
    print("state", sum(values.nbytes for values in expected.values()))
    name = "whole (8, 4)"
    sharding = NamedSharding(mesh, P("replica") if process else P())
    moved = {**target, name: jax.ShapeDtypeStruct((8, 4), expected[name].dtype, sharding=sharding)}
    try:
        saver.restore(moved)
    except ValueError as error:
        print("refused", "must be alike on all processes" in str(error))
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 4])
def test_each_byte_is_read_once(tmp_path, count):
    lines = run(RESTORE, count, tmp_path, devices=8)
    read = sum(int(printed(found, "read")) for found in lines)
    assert read == int(printed(lines[0], "state"))
    assert [printed(found, "refused") for found in lines] == ["True"] * count


@pytest.mark.parametrize("size", [4, 16, 64])
def test_streams_arrive_as_they_were_sent(monkeypatch, size):
    """Two groups of three processes, arrays of different readers and of several boxes, in rounds of
    some bytes."""
    groups = ((0, 2, 4), (1, 3, 5))
    first, second = ((0, 4),), ((4, 8),)
    kinds = [
        ArrayKind((8,), np.dtype(dtype), (4,)) for dtype in ("float32", "int16", "uint8", "float64")
    ]
    arrays = []
    for i, kind in enumerate([*kinds, *kinds]):
        boxes = ((first, second), (second,)) if i == 5 else ((first,), (second,))
        arrays.append(_SharedArray(f"a{i}", kind, boxes, i % 3 if i else 2))
    values = {
        array.name: np.arange(8).astype(array.kind.dtype) * 3 + i for i, array in enumerate(arrays)
    }

    def boxes_of_group(group):
        return {
            array.name: {box: values[array.name][slice(*box[0])] for box in array.boxes[group]}
            for array in arrays
        }

    sent = {}

    class Recorded:
        """Notes what this process sends, and gives it zeros."""

        def __init__(self, groups, size):
            self.rows = sent.setdefault(jax.process_index(), [])

        def gather(self, row):
            self.rows.append(row)
            return [np.zeros_like(row)] * 3

    class Known(Recorded):
        def __init__(self, groups, size):
            (group,) = [group for group in groups if jax.process_index() in group]
            self.rounds = zip(*[sent[process] for process in group], strict=True)

        def gather(self, row):
            return next(self.rounds)

    monkeypatch.setattr(shared_reads, "_MIN_ROUND_BYTES", size)
    monkeypatch.setattr(shared_reads, "_ROUND_BYTES", 3 * size)
    for gather in (Recorded, Known):
        monkeypatch.setattr(shared_reads, "_Gather", gather)
        for group, processes in enumerate(groups):
            for process in processes:
                monkeypatch.setattr(jax, "process_index", lambda process=process: process)
                found = {
                    array.name: boxes
                    for array, boxes in _received(groups, arrays, boxes_of_group(group))
                }
                if gather is Known:
                    assert found.keys() == values.keys()
                    for name, boxes in boxes_of_group(group).items():
                        for box, expected in boxes.items():
                            np.testing.assert_array_equal(found[name][box], expected, name)
