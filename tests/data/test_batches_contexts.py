"""Batches and prefetching under JAX contexts: meshes, transfer guards, and configuration options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jstep.data.batches import batches
from jstep.data.prefetch import prefetch_to_device

MESHES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]


def jax_settings():
    return (
        jax.config.jax_default_prng_impl,
        jax.config.jax_enable_x64,
        jax.config.jax_numpy_dtype_promotion,
        jax.sharding.get_mesh(),
    )


@pytest.mark.parametrize("kind", MESHES)
def test_source_runs_in_the_context_of_the_caller(kind):
    def source():
        for _ in range(3):
            seen.append(jax_settings())
            yield jax.random.key_data(jax.random.key(0))

    seen = []
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with (
        jax.default_prng_impl("rbg"),
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.set_mesh(mesh),
    ):
        expected = list(source())
        with prefetch_to_device(source()) as items:
            for item, want in zip(items, expected, strict=True):
                np.testing.assert_array_equal(item, want)
        assert seen == [jax_settings()] * 6


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("sharding", [None, jax.P("data")])
def test_prefetch_under_a_mesh(kind, sharding):
    rows = np.arange(32.0).reshape(16, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        with prefetch_to_device(batches(rows, 8, shuffle=False, num_epochs=1), sharding=sharding) as items:
            found = list(items)
        assert len(found[0].sharding.device_set) == (1 if sharding is None else 8)
        assert float(jax.jit(lambda x: (2 * x).sum())(found[1])) == 2 * rows[8:].sum()


@pytest.mark.parametrize("sharding", [None, jax.sharding.SingleDeviceSharding(jax.devices()[1])])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfer_guard_applies_only_to_the_source(sharding, level):
    def source():
        seen.append(jax.config.jax_transfer_guard_host_to_device)
        yield {"x": np.arange(3), "scale": 2.0}

    seen = []
    with jax.transfer_guard(level), prefetch_to_device(source(), sharding=sharding) as items:
        (item,) = items
    assert seen == [level]
    np.testing.assert_array_equal(item["x"], np.arange(3))


def test_batches_of_device_arrays_under_a_guard():
    x = jnp.arange(10)
    with jax.transfer_guard("disallow_explicit"):
        np.testing.assert_array_equal(batches(x, 5, shuffle=False)[1], np.arange(5, 10))


@pytest.mark.parametrize(
    ("item", "match"),
    [
        ("x", r"item: the item must be a number or an array of numbers, got 'x', a str"),
        ({"label": ["cat"], "x": np.ones(2)}, r"the leaf at 'label/0' .*got 'cat', a str"),
        ({"label": np.array(["cat"])}, r"the leaf at 'label' .*an array of <U3"),
        ({"when": np.datetime64("2026-01-01")}, r"the leaf at 'when' .*datetime64"),
        ({"f": len}, r"the leaf at 'f' .*builtin_function"),
    ],
)
def test_unsupported_leaves_are_named(item, match):
    for sharding in (None, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
        with pytest.raises(TypeError, match=match), prefetch_to_device(iter([item]), sharding=sharding) as items:
            next(items)


def test_iterable_datasets_are_only_prefetched():
    class Streaming:
        """Like PyTorch's IterableDataset, whose __getitem__ raises NotImplementedError."""

        def __len__(self):
            return 10

        def __iter__(self):
            return iter(range(10))

        def __getitem__(self, index):
            raise NotImplementedError("Subclasses of Dataset should implement __getitem__.")

    with pytest.raises(TypeError, match=r"items of the Streaming at .* cannot be taken in any order.*jstep\.train"):
        batches(Streaming(), 2)[0]
    with prefetch_to_device(Streaming()) as items:
        assert [int(item) for item in items] == list(range(10))


def test_torch_iterable_dataset():
    torch = pytest.importorskip("torch")

    class Streaming(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(3.0))

    with pytest.raises(TypeError, match=r"no len\(\).*jstep.train"):
        batches(Streaming(), 2)
    with prefetch_to_device(Streaming()) as items:
        assert [float(item) for item in items] == [0.0, 1.0, 2.0]


def test_slices_are_batches():
    data = batches(np.arange(10), 3, num_epochs=4)
    view = data[2:][::3]
    assert type(view) is type(data)
    assert [b.tolist() for b in view] == [data[i].tolist() for i in (2, 5, 8, 11)]
    assert "steps range(2, 12, 3)" in repr(view)
    assert "steps 7, 9, …" in repr(batches(np.arange(10), 3)[7::2])
    iterator = view.from_step(3)
    next(iterator)
    assert iterator.step == 4


def test_prng_keys_as_rows():
    keys = jax.random.split(jax.random.key(0), 10)
    data = batches({"key": keys, "i": np.arange(10)}, 4, seed=1)
    with jax.transfer_guard("disallow_explicit"):
        batch = data[3]
    np.testing.assert_array_equal(jax.random.key_data(batch["key"]), jax.random.key_data(keys)[batch["i"]])
    assert batches(keys, 4, shuffle=False)[1].shape == (4,)
    with prefetch_to_device(data[:1]) as items:
        assert next(items)["key"].dtype == keys.dtype
