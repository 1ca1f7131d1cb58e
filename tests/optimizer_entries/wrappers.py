"""Entries of wrappers of optimizers and of elements of chains."""

import jax
import jax.numpy as jnp
import optax
from optimizer_entries.classic import AGED, MOMENTUM, label
from optimizer_entries.entry import ADAM, EMA, MADE_AT, ZEROS, Entry

import jstep

KEY = jax.random.key(7)
DRAWN = {"drawn/step": 0, "drawn/count": 0}


def with_element(element, *hyper, after=False):
    def make(lr):
        inner = jstep.momentum(lr, 0.9)
        return jstep.chain(inner, element) if after else jstep.chain(element, inner)

    return Entry(make, {"momentum": 0.0}, tuple(sorted((*MOMENTUM, *hyper))), rate=0.01, steps=0)


def clipped(params):
    return jax.tree.map(
        lambda p: jnp.clip(p, -50.0, 50.0) if jnp.issubdtype(p.dtype, jnp.floating) else p, params
    )


def from_optax(lr):
    return jstep.from_optax(optax.adam(lr), {"learning_rate": lr})


WRAPPERS = {
    "from_optax": Entry(
        from_optax,
        {"optax/0/mu": 0.0, "optax/0/nu": 0.0},
        ("learning_rate",),
        {"optax/0/count": 0},
        rate=0.02,
    ),
    "held": Entry(
        lambda lr: jstep.adam(lr, epsilon=jstep.held("epsilon", 1e-8)),
        ZEROS,
        ("beta1", "beta2", "learning_rate"),
        {"held/epsilon": 1e-8, **AGED},
        rate=0.02,
    ),
    "master_weights": Entry(
        lambda lr: jstep.master_weights(jstep.adam(lr)),
        {"master": "copy", **ZEROS},
        ADAM,
        AGED,
        rate=0.02,
    ),
    "stochastic_rounding": Entry(
        lambda lr: jstep.stochastic_rounding(jstep.adam(lr), KEY),
        ZEROS,
        ADAM,
        AGED | DRAWN,
        rate=0.02,
        steps=0,
        by_step=True,
    ),
    "lookahead": Entry(
        lambda lr: jstep.lookahead(jstep.adam(lr), sync_period=2),
        {"slow": "copy", **ZEROS},
        tuple(sorted((*ADAM, "slow_step_size"))),
        AGED,
        rate=0.02,
        averages=("slow",),
    ),
    # The update stays in memory while its agreeing elements are counted.
    "cautious": Entry(
        lambda lr: jstep.cautious(jstep.momentum(lr, 0.9)),
        {"momentum": 0.0},
        MOMENTUM,
        rate=0.005,
        copies=1.4,
    ),
    "dynamic_loss_scale": Entry(
        lambda lr: jstep.dynamic_loss_scale(jstep.adam(lr), initial=1.0),
        ZEROS,
        ADAM,
        {"loss_scale": 1.0, "scale_since": MADE_AT, **AGED},
        rate=0.02,
        steps=0,
    ),
    "with_noise_scale": Entry(
        lambda lr: jstep.with_noise_scale(jstep.adam(lr)),
        ZEROS,
        ADAM,
        {"noise/gradient_noise": 0.0, "noise/gradient_square": 0.0, "noise/weight": 0.0, **AGED},
        rate=0.02,
    ),
    "with_projection": Entry(
        lambda lr: jstep.with_projection(jstep.adam(lr), clipped), ZEROS, ADAM, AGED, rate=0.02
    ),
    "average_of_some": Entry(
        lambda lr: jstep.with_moving_average(
            jstep.momentum(lr, 0.9),
            jstep.ExponentialMovingAverage(1.0, zero_debias=True, start_step=8, every=2),
            var_list=lambda path, leaf: path != "half",
        ),
        {EMA: "other", "momentum": 0.0},
        MOMENTUM,
        {f"with_moving_average/{EMA}/start_step": MADE_AT},
        rate=0.01,
        steps=0,
        averages=(EMA,),
        by_step=True,
    ),
    "frozen": Entry(
        lambda lr: jstep.partition(
            {"one": jstep.momentum(lr, 0.9)}, lambda path, leaf: None if path == "f" else "one"
        ),
        {"one/momentum": 0.0},
        tuple(f"one/{name}" for name in MOMENTUM),
        rate=0.01,
        steps=0,
    ),
    "halves": Entry(
        lambda lr: jstep.partition(
            {"one": jstep.cautious(jstep.adam(lr)), "one/m": jstep.lookahead(jstep.adam(lr))},
            halves,
        ),
        {"one/m": 0.0, "one/v": 0.0, "one/m/m": 0.0, "one/m/v": 0.0, "one/m/slow": "copy"},
        (
            *(f"one/{name}" for name in ADAM),
            *(f"one/m/{name}" for name in ADAM),
            "one/m/slow_step_size",
        ),
        {"one/start_step": MADE_AT, "one/m/start_step": MADE_AT},
        rate=0.01,
        steps=0,
        averages=("one/m/slow",),
        copies=1.4,
    ),
    "decay_weights": with_element(
        jstep.decay_weights(1e-3, ["*"]), "decoupled_weight_decay", after=True
    ),
    "decay_cautiously": with_element(
        jstep.decay_weights(jstep.constant(1e-3), cautious=True),
        "decoupled_weight_decay",
        after=True,
    ),
    "scale_updates": with_element(jstep.scale_updates({"*": 0.5}), "scale/*", after=True),
    "adaptive_clipping": with_element(jstep.clip_gradients(adaptive=0.5), "clip_adaptive"),
    "centralize_gradients": with_element(jstep.centralize_gradients()),
    "normalize_gradients": with_element(jstep.normalize_gradients(), "gradient_norm"),
    "add_noise": with_element(
        jstep.add_noise(1e-4, 0.55, KEY), "noise_eta", "noise_gamma"
    )._replace(scalars=DRAWN, copies=2.3, by_step=True),
    "stateless": with_element(
        jstep.stateless(lambda updates, params, step: jstep.clip_by_value(updates, -1.0, 1.0))
    ),
    "update_every": Entry(
        lambda lr: jstep.update_every(jstep.adam(lr), 2),
        ZEROS,
        ADAM,
        AGED,
        rate=0.02,
        by_step=True,
        idle=1,
    ),
    # The sum of the gradients stays in memory while the update reads it.
    "accumulating": Entry(
        lambda lr: jstep.update_every(jstep.momentum(lr, 0.9), 2, accumulate=True),
        {"gradient_count": "scalar", "gradient_sum": 0.0, "momentum": 0.0},
        MOMENTUM,
        rate=0.01,
        by_step=True,
        idle=1,
        copies=1.3,
    ),
}


def halves(path, leaf):
    return "one" if label(path, leaf) == "one" else "one/m"
