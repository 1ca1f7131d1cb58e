"""Claims of the page "From Flax", checked against Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, run_page

import jstep

pytest.importorskip("flax")


@functools.cache
def page():
    """The names that the page defines."""
    return run_page(DOCS / "from" / "flax.md")


def test_the_loss_scale_changes_at_the_steps_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    theirs = dynamic_scale.DynamicScale(growth_interval=4)
    optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(0.1), initial=2.0**16, period=5)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)

    def loss_fn(params, factor):
        return jnp.sum(params["w"]) * factor

    train_step = jstep.minimize(loss_fn, optimizer)
    of_flax = jax.jit(lambda scale, factor: scale.value_and_grad(loss_fn)({"w": jnp.ones(3)}, factor)[0])
    wanted, found = [], []
    for n in range(60):
        factor = jnp.float32(np.inf if n in (3, 4, 20, 41) else 1.0)
        theirs = of_flax(theirs, factor)
        state, _ = train_step(state, factor)
        wanted.append(float(theirs.scale))
        found.append(float(state.slots["loss_scale"]))
    assert found == wanted
    assert len(set(wanted)) > 5


def test_the_defaults_of_the_loss_scale_of_flax():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    default = dynamic_scale.DynamicScale()
    names = ("scale", "growth_interval", "growth_factor", "backoff_factor", "minimum_scale")
    assert [float(getattr(default, name)) for name in names] == [2.0**16, 2000, 2, 0.5, 2.0**-126]


@pytest.mark.thorough
@jax.numpy_dtype_promotion("standard")
def test_metrics_of_several_batches():
    from flax import nnx

    names = page()
    theirs = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    graphdef, params, rest = nnx.split(names["Net"](nnx.Rngs(0)), nnx.Param, ...)
    state = jstep.TrainState.create(params, jstep.gradient_descent(0.1), model_state=rest)
    net = nnx.merge(graphdef, params, rest, copy=True)
    net.eval()
    inputs, labels = names["inputs"], names["labels"]
    for rows in (slice(0, 8), slice(8, 10)):
        logits = net(inputs[rows])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[rows][:, None], axis=1)[:, 0]
        theirs.update(loss=-chosen, logits=logits, labels=labels[rows])
    found, wanted = names["evaluate"](state), theirs.compute()
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == pytest.approx(float(wanted[name]), rel=1e-6)


@pytest.mark.thorough
def test_a_name_bound_by_vmap_equals_pmap_on_one_device():
    names = page()
    variables, inputs, targets = names["variables"], names["inputs"], jnp.zeros((10, 2))
    arguments = (variables["params"], variables["batch_stats"], inputs, targets)
    ours = jax.jit(jax.value_and_grad(names["loss_of_batch"], has_aux=True))(*arguments)
    of_part = jax.value_and_grad(names["loss_of_part"], has_aux=True)

    def averaged(*arguments):
        (loss, statistics), gradients = of_part(*arguments)
        return (loss, statistics), jax.lax.pmean(gradients, "batch")

    first = jax.devices()[:1]
    theirs = jax.pmap(averaged, "batch", devices=first)(*jax.tree.map(lambda x: x[None], arguments))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), ours, theirs)
    with pytest.raises(NameError, match="unbound axis name: batch"):
        names["loss_of_part"](*arguments)
