"""Batches and summaries in every JAX context that a caller may have set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep import summary


def on_mesh(kind):
    return jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,)))


CONTEXTS = {
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "set_mesh Auto": lambda: on_mesh(jax.sharding.AxisType.Auto),
    "set_mesh Explicit": lambda: on_mesh(jax.sharding.AxisType.Explicit),
    "enable_x64": lambda: jax.enable_x64(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "transfer_guard, explicit too": lambda: jax.transfer_guard("disallow_explicit"),
    "debug_nans": lambda: jax.debug_nans(True),
    "checking_leaks": jax.checking_leaks,
    "disable_jit": jax.disable_jit,
    "default_device": lambda: jax.default_device(jax.devices()[2]),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "default_matmul_precision": lambda: jax.default_matmul_precision("float32"),
}
in_each_context = pytest.mark.parametrize("context", CONTEXTS)


class Items:
    """A source whose items are device arrays."""

    def __init__(self, item):
        self._item = item

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self._item


@pytest.mark.thorough(except_for=["set_mesh Explicit", "transfer_guard, explicit too", "enable_x64"])
@in_each_context
def test_batches_and_prefetching(context):
    device = {"x": jnp.arange(12.0).reshape(6, 2)}
    with CONTEXTS[context]():
        data = jstep.batches((np.arange(20.0).reshape(10, 2), np.arange(10)), 4, num_epochs=2)
        with jstep.prefetch_to_device(data) as items:
            for (x, y), (bx, by) in zip(items, data, strict=True):
                assert isinstance(x, jax.Array)
                with jax.transfer_guard("allow"):
                    np.testing.assert_array_equal(x, bx)
                    np.testing.assert_array_equal(y, by)
        assert jstep.batches(device, 3)[2:9][1]["x"].shape == (3, 2)
        assert jstep.batches(Items(device), 2)[3]["x"].shape == (2, 6, 2)


@pytest.mark.thorough(except_for=["transfer_guard"])
@in_each_context
def test_summaries(context, tmp_path):
    x, step = jnp.arange(12.0).reshape(6, 2), jnp.int32(3)

    def model(x):
        summary.scalar("in", x.sum())
        summary.histogram("values", x)
        summary.image("pictures", x[None, :, :, None])
        return x * 2

    with CONTEXTS[context](), summary.SummaryWriter(tmp_path) as writer:
        writer.add_summary(summary.scalar("step", step), step)
        writer.add_summary(summary.histogram("h", x), step)
        writer.add_summary(summary.histogram("host", np.arange(5)), np.int64(4))
        writer.add_summary(summary.image("i", np.ones((2, 3, 3, 1))), 5)
        writer.add_summary(summary.scalar("zeros", summary.zero_fraction(x)), 5)
        _, collected = jax.jit(summary.collect(model))(x)
        writer.add_summary(collected, 6)
        writer.add_graph(jnp.sin, x)
        writer.add_graph(jax.jit(lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[0]).lower(x))
        summary.write_graph(lambda: jnp.ones(3), tmp_path, "graph.pbtxt")
        assert [value.tag for value in summary.to_proto(collected).value] == ["in", "values", "pictures/image/0"]
    assert len(list(summary.summary_iterator(writer.path))) == 9
    summary.merge_all()
