"""Claims of the page "From Flax" and of the recipe for NNX, checked against Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, blocks_of, run_page

import jstep

pytest.importorskip("flax")


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.parametrize(
    "seeds", [{"default": 0, "noise": 1}, {"default": 0}, {"params": 0, "dropout": 1, "noise": 2, "more": 3}], ids=str
)
def test_every_stream_of_a_model_follows_the_key(seeds):
    from flax import nnx

    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.rngs = nnx.Linear(4, 4, rngs=rngs), rngs

        def drawn(self):
            return jnp.stack([jax.random.normal(getattr(self.rngs, name)(), (8,)) for name in [*seeds, "unnamed"][:4]])

    net = Noisy(nnx.Rngs(**({"default": 9} | seeds)))
    drawn = helper()(lambda model: model.drawn(), net)
    a, b, again = (np.asarray(drawn(*parts(net), rng=jax.random.key(n))[0]) for n in (0, 1, 0))
    assert (a != b).all()
    assert (a == again).all()
    assert len({row.tobytes() for row in a}) == len(a)


@pytest.mark.thorough
def test_a_training_cell_of_the_notebook_recipe_begins_with_new_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = DOCS / "recipes" / "notebook.md"
    names = run_page(recipe)
    (cell,) = [block.code for block in blocks_of(recipe) if "nnx.update(" in block.code]
    before = names["of_model"].params
    names["history"] = None
    exec(cell, names)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(names["of_model"].params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(jnp.max(jnp.abs(names["model"].kernel[...] - before["kernel"][...]))) == 0
