"""Claims of the page "From Flax" and of the recipe for NNX, checked against Flax."""

import contextlib
import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, blocks_of, run_page

import jstep

pytest.importorskip("flax")


@functools.cache
def page():
    """The names that the page defines; its files are written to a folder that is deleted."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
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


@functools.cache
def helper():
    """The function `pure` of the recipe."""
    recipe = DOCS / "recipes" / "model-libraries.md"
    first = blocks_of(recipe)[0].code
    return run_page(recipe, lambda code: code if code == first else "")["pure"]


def network(rngs, rate):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            self.inner, self.norm = nnx.Linear(4, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.first, self.second = nnx.Dropout(rate, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.inner(x))

        def masks(self):
            return jnp.stack([self.first(jnp.ones(64)) > 0, self.second(jnp.ones(64)) > 0])

    return Net()


def parts(net):
    from flax import nnx

    _, params, _, statistics = nnx.split(net, nnx.Param, nnx.RngState, ...)
    return params, statistics


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_the_helper_for_nnx_trains_as_nnx_does():
    from flax import nnx

    def loss(model, x):
        return jnp.mean(jnp.sin(model(x)))

    x = jax.random.normal(jax.random.key(0), (32, 4))
    net = network(nnx.Rngs(0), 0.0)
    net.eval()  # the helper trains all the same
    optimizer = jstep.gradient_descent(0.5)
    params, statistics = parts(net)
    state = jstep.TrainState.create(params, optimizer, model_state=statistics)
    train_step = jstep.minimize(helper()(loss, net), optimizer, has_model_state=True, rng=jax.random.key(1))

    net.train()
    for _ in range(3):
        grads = nnx.grad(loss)(net, x)
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(net, nnx.Param), grads))
        state, _ = train_step(state, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        parts(net),
        (state.params, state.model_state),
    )

    net.eval()
    found = helper()(lambda model, x: {"loss": loss(model, x)}, net, training=False)(*parts(net), x)
    assert found["loss"] == loss(net, x)


@pytest.mark.parametrize("seeds", [{"default": 0}, {"params": 0, "dropout": 1}], ids=["one stream", "two streams"])
def test_the_helper_for_nnx_draws_other_masks_in_each_layer_and_step(seeds):
    from flax import nnx

    net = network(nnx.Rngs(**seeds), 0.5)
    masks = helper()(lambda model: model.masks(), net)
    (a, statistics), (b, _), (again, _) = (masks(*parts(net), rng=jax.random.key(n)) for n in (0, 1, 0))
    assert len({mask.tobytes() for mask in np.asarray([*a, *b])}) == 4
    assert (a == again).all()
    assert not nnx.to_flat_state(nnx.filter_state(statistics, nnx.RngState)), "keys are not in model_state"
    with pytest.raises(TypeError, match="unexpected PRNG key type"):
        masks(*parts(net))
