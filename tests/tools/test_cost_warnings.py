"""Warnings in the cost of a step."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.core.jaxprs import is_annotated
from jstep.tools.compiled import parse_program
from jstep.tools.cost import find_warnings

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
BOTH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
WIDTH, LAYERS, WORDS, TIME = 64, 2, 128, 16
OPTIMIZER = jstep.adam(1e-3)


def weights():
    return {
        "embed": jnp.zeros((WORDS, WIDTH)),
        "out": jnp.zeros((WIDTH, WORDS)),
        "layers": {"up": jnp.zeros((LAYERS, WIDTH, 4 * WIDTH)), "down": jnp.zeros((LAYERS, 4 * WIDTH, WIDTH))},
    }


def block(x, layer):
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None


def language_model(params, tokens, *, place=lambda x: x, block=block):
    x = place(params["embed"][tokens[:, :-1]])
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = x @ params["out"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0])


def on_rows(x):
    """The constraint that the warning suggests."""
    mesh = MESH
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))


def create(init, mesh=MESH, specs=None, slot_axis=None, optimizer=OPTIMIZER):
    shapes = jax.eval_shape(lambda: jstep.TrainState.create(init(), optimizer))
    return jstep.shard_state(shapes, mesh, specs, slot_axis=slot_axis)


def fsdp(init=weights):
    return create(init, specs=jstep.fsdp_specs(jax.eval_shape(init), MESH, min_size=64))


def rows(*shape, dtype=jnp.float32, mesh=MESH, spec=("data",)):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


TOKENS = rows(32, TIME + 1, dtype=jnp.int32)


def warnings_for(step, state, *args):
    step = step if hasattr(step, "lower") else jax.jit(step)
    compiled = step.lower(state, *args).compile()
    return find_warnings(
        parse_program(compiled.as_text()), state, args, step.trace(state, *args).jaxpr, compiled.out_info
    )


@pytest.mark.thorough(except_for=["stored"])
@pytest.mark.parametrize("one_block", [block, jax.checkpoint(block)], ids=["stored", "recomputed"])
def test_fsdp_without_an_activation_constraint(one_block):
    """XLA moves activations to the weights without the constraint, and weights to the activations with it."""
    loss = functools.partial(language_model, block=one_block)
    (found,) = warnings_for(jstep.minimize(loss, OPTIMIZER), fsdp(), TOKENS)
    assert found.startswith("activations are resharded (")
    assert 'x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))' in found
    assert not warnings_for(jstep.minimize(functools.partial(loss, place=on_rows), OPTIMIZER), fsdp(), TOKENS)


def mlp():
    return {"a": jnp.zeros((64, 32)), "b": jnp.zeros((32,)), "x": jnp.zeros((32, 64))}


def regression(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["a"] + params["b"][None]) @ params["x"] - y) ** 2)


PAIRS = (rows(64, 64), rows(64, 64))
REPLICATED = functools.partial(create, mlp)
TENSOR = functools.partial(create, mlp, BOTH, [("a", P(None, "model")), ("b", P("model")), ("x", P("model"))], "data")
STEP = jstep.minimize(regression, OPTIMIZER)


@pytest.mark.thorough(except_for=["replicated", "scanned steps"])
@pytest.mark.parametrize(
    ("step", "state", "args"),
    [
        (STEP, REPLICATED, PAIRS),
        (STEP, TENSOR, (rows(64, 64, mesh=BOTH), rows(64, 64, mesh=BOTH))),
        (jstep.minimize(regression, OPTIMIZER, num_microbatches=4), REPLICATED, PAIRS),
        (jstep.scan_steps(STEP, 3), functools.partial(fsdp, mlp), (rows(3, 64, 64, spec=(None, "data")),) * 2),
    ],
    ids=["replicated", "tensor", "microbatches", "scanned steps"],
)
def test_layouts_without_warnings(step, state, args):
    assert warnings_for(step, state(), *args) == []


def contrastive(params, x, y):
    """Compare every row with all others, which requires a gather of activations."""
    u, w = x @ params["a"], y @ params["a"]
    scores = u @ w.T
    return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.sum(u * w, 1))


def normalized(params, x, y):
    """Gather values computed from parameters instead of the parameters."""
    return regression({**params, "a": params["a"] / jnp.linalg.norm(params["a"], axis=0, keepdims=True)}, x, y)


@pytest.mark.parametrize("loss", [contrastive, normalized])
def test_required_gathers_do_not_warn(loss):
    assert warnings_for(jstep.minimize(loss, OPTIMIZER), fsdp(mlp), *PAIRS) == []


def experts():
    return {"router": jnp.zeros((64, 64)), "up": jnp.zeros((8, 64, 128)), "down": jnp.zeros((8, 128, 64))}


def routed(params, x):
    """Send rows to experts on different devices and back."""

    def inside(up, down, x):
        sent = jax.lax.all_to_all(x.reshape(8, -1, 64), "data", 0, 0)
        back = jax.nn.relu(sent.reshape(-1, 64) @ up[0]) @ down[0]
        return jax.lax.all_to_all(back.reshape(8, -1, 64), "data", 0, 0).reshape(-1, 64)

    spec = P("data")
    moved = jax.shard_map(inside, mesh=MESH, in_specs=(spec, spec, spec), out_specs=spec)
    return jnp.mean((moved(params["up"], params["down"], x @ params["router"]) - x) ** 2)


def sequence_parallel(params, x):
    """Apply custom constraints to activations, between which XLA moves them."""

    def place(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(BOTH, P(*spec)))

    for _ in range(2):
        hidden = jax.nn.gelu(place(x, "data") @ params["a"])
        x = place(x + hidden @ params["x"], "data", "model")
    return jnp.mean(x**2)


def test_explicit_exchanges_do_not_warn():
    specs = [("router", P()), ("*", P("data"))]
    step = jstep.minimize(routed, OPTIMIZER)
    state, batch = create(experts, specs=specs), rows(512, 64)
    assert "all-to-all" in jstep.cost(step, state, batch).collectives
    assert warnings_for(step, state, batch) == []
    step = jstep.minimize(sequence_parallel, OPTIMIZER)
    state, batch = TENSOR(), rows(16, 32, 64, mesh=BOTH)
    assert {"all-to-all", "all-gather"} & jstep.cost(step, state, batch).collectives.keys()
    assert warnings_for(step, state, batch) == []


def test_is_annotated_finds_constraints_of_the_loss():
    def traced(loss):
        return jstep.minimize(loss, OPTIMIZER, num_microbatches=2).trace(fsdp(), TOKENS).jaxpr

    assert not is_annotated(traced(language_model))  # the constraint for microbatches is not one of the loss
    assert is_annotated(traced(functools.partial(language_model, place=on_rows)))


def test_undonated_state_warns():
    undonated = jstep.minimize(regression, OPTIMIZER, donate=False)
    (found,) = warnings_for(undonated, REPLICATED(), *PAIRS)
    total = 3 * 4 * (64 * 32 + 32 + 32 * 64) + 8
    assert found.startswith(f"{total / 1024:.3g} KiB of the state is not donated (params['a'] and 10 more)")
    assert "jax.jit(step, donate_argnums=0)" in found

    def only_metrics(state, x, y):
        return {"loss": regression(state.params, x, y)}

    assert warnings_for(only_metrics, REPLICATED(), *PAIRS) == []


def test_gathered_slots_warn():
    """An update that needs all rows of a sharded slot."""

    def step(state, x, y):
        _, sums = jax.value_and_grad(regression)(state.params, x, y)
        slots = {**state.slots, "m": jax.tree.map(lambda m, g: 0.9 * m + g, state.slots["m"], sums)}
        gathered = jax.lax.with_sharding_constraint(state.slots["m"]["a"], NamedSharding(MESH, P()))
        params = {**state.params, "a": state.params["a"] - gathered @ gathered.T @ state.params["a"]}
        return state.replace(params=params, slots=slots), {}

    state = create(mlp, slot_axis="data")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    (found,) = warnings_for(jax.jit(step, donate_argnums=0, out_shardings=(shardings, {})), state, *PAIRS)
    assert found.startswith(f"slots are gathered (slots['m']['a']; {4 * 64 * 32 // 1024} KiB per step)")


@pytest.mark.thorough(except_for=["inside"])
@pytest.mark.parametrize("how", ["inside", "specs"])
def test_slots_gathered_by_a_shard_map_do_not_warn(how):
    """An update that requests whole slots by hand, by a collective or by its specs, is not an accident."""

    def from_shard(m):
        return 0 * m + jnp.sum(jax.lax.all_gather(m, "data", tiled=True) ** 2)

    def from_whole(m):
        return jnp.full((m.shape[0] // MESH.size, *m.shape[1:]), jnp.sum(m**2))

    by_specs = jax.shard_map(from_whole, mesh=MESH, in_specs=P(), out_specs=P("data"), check_vma=False)
    mapped = (
        by_specs if how == "specs" else jax.shard_map(from_shard, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    )

    def step(state, x, y):
        _, sums = jax.value_and_grad(regression)(state.params, x, y)
        m = state.slots["m"]["a"]
        slots = {**state.slots, "m": jax.tree.map(lambda m, g: 0.9 * m + g, state.slots["m"], sums)}
        params = {**state.params, "a": state.params["a"] - mapped(m)}
        return state.replace(params=params, slots=slots), {}

    state = create(mlp, slot_axis="data")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, {}))
    assert "all-gather" in jstep.cost(step, state, *PAIRS).collectives
    assert warnings_for(step, state, *PAIRS) == []


@pytest.mark.thorough
def test_batch_outside_the_mesh_warns():
    """Its program differs from that of a run with a sharded batch."""
    state, (x, y) = fsdp(mlp), (np.ones((64, 64), np.float32), jnp.ones((64, 64)))
    for batch in ((x, y), jax.eval_shape(lambda: (x, y))):
        found, *_ = jstep.cost(STEP, state, *batch).warnings
        assert found.startswith("the batch is not on the mesh of the state, so each of its 8 devices gets all of it")
        assert "jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))" in found
    for arguments in ((state, *jstep.shard_batch((x, y), MESH)), (state, x, PAIRS[1])):
        assert jstep.cost(STEP, *arguments).warnings == ()
    for one_device in (create(mlp, jax.make_mesh((1,), ("data",))), jstep.TrainState.create(mlp, OPTIMIZER)):
        assert jstep.cost(STEP, one_device, x, y).warnings == ()

    def without_rows(params, key, scale):
        x = jax.random.normal(key, (64, 64))
        return scale * regression(params, x, x)

    step = jstep.minimize(without_rows, OPTIMIZER)
    assert not any("batch" in found for found in jstep.cost(step, state, jax.random.key(0), 2.0).warnings)


def stacked():
    return {"up": jnp.zeros((8, 64, 256)), "down": jnp.zeros((8, 256, 64))}


def layers(params, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(block), x, params)[0] ** 2)


def test_layers_sharded_along_the_stacked_axis_warn():
    """A TPU gathers all layers in each iteration to use one; a CPU gathers them once."""
    state, batch = create(stacked, specs=[("*", P("data"))]), rows(64, 64)
    step = jstep.minimize(layers, OPTIMIZER)
    assert warnings_for(step, state, batch) == []
    text = (Path(__file__).parent / "compiled_programs" / "stacked_tpu_0_10_2.txt").read_text()
    (found,) = find_warnings(parse_program(text), state, [batch], step.trace(state, batch).jaxpr)
    assert found.startswith("parameters are gathered more often than they are used (params['")
    assert " and 1 more; 16 times per step): " in found
    assert 'jax.P(None, "data")' in found


def test_blocks_that_devices_share_are_reported():
    def init():
        return {"w": jnp.zeros((64, 512)), "v": jnp.zeros((64, 512))}

    def text(block, specs):
        state = create(init, specs=specs, optimizer=jstep.compact(jstep.adam(1e-3), block=block))
        return "\n".join(find_warnings(parse_program(""), state, (), jax.make_jaxpr(lambda: None)()))

    specs = [("w", P(None, "data"))]
    assert "blocks of slots are split between devices (slots/m/w and 1 more)" in text(128, specs)
    assert "blocks" not in text(32, specs)
    assert "blocks" not in text(128, [("w", P("data"))])
