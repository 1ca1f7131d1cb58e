"""Entries of the optimizers of tf.train, and of the basic combinations of optimizers."""

from optimizer_entries.entry import ADAM, EMA, MADE_AT, ZEROS, Entry

import jstep

RMSPROP = ("decay", "epsilon", "learning_rate", "momentum")
MOMENTUM = ("learning_rate", "momentum")
FTRL = (
    "beta",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "l2_shrinkage_regularization_strength",
    "learning_rate",
    "learning_rate_power",
)
AGED = {"start_step": MADE_AT}


def label(path, leaf):
    return "one" if path.endswith(("a", "x")) else "other"


CLASSIC = {
    "gradient_descent": Entry(jstep.gradient_descent, {}, ("learning_rate",), rate=0.02),
    "momentum": Entry(lambda lr: jstep.momentum(lr, 0.9), {"momentum": 0.0}, MOMENTUM, rate=0.01),
    "nesterov": Entry(
        lambda lr: jstep.momentum(lr, 0.9, use_nesterov=True),
        {"momentum": 0.0},
        MOMENTUM,
        rate=0.01,
    ),
    "adagrad": Entry(jstep.adagrad, {"accumulator": 0.1}, ("learning_rate",), rate=0.5),
    "adam": Entry(jstep.adam, ZEROS, ADAM, AGED, rate=0.02),
    "rmsprop": Entry(jstep.rmsprop, {"momentum": 0.0, "rms": 1.0}, RMSPROP, rate=0.002, steps=4000),
    "rmsprop_centered": Entry(
        lambda lr: jstep.rmsprop(lr, momentum=0.5, epsilon=1e-3, centered=True),
        {"mg": 0.0, "momentum": 0.0, "rms": 1.0},
        RMSPROP,
        rate=0.001,
        steps=4000,
    ),
    "ftrl": Entry(jstep.ftrl, {"accum": 0.1, "linear": 0.0}, FTRL, rate=0.5, steps=4000),
    "ftrl_l1_l2": Entry(
        lambda lr: jstep.ftrl(lr, -0.5, 0.2, 1e-4, 1e-4, 1e-5, 0.1),
        {"accum": 0.2, "linear": 0.0},
        FTRL,
        rate=0.5,
        steps=4000,
    ),
    "chain": Entry(
        lambda lr: jstep.chain(jstep.clip_gradients(by_global_norm=5.0), jstep.adam(lr)),
        ZEROS,
        tuple(sorted((*ADAM, "clip_by_global_norm"))),
        AGED,
        rate=0.02,
    ),
    "chain_by_value": Entry(
        lambda lr: jstep.chain(jstep.clip_gradients(by_value=(-5.0, 4.0)), jstep.momentum(lr, 0.9)),
        {"momentum": 0.0},
        ("clip_by_value_max", "clip_by_value_min", *MOMENTUM),
        rate=0.01,
    ),
    "scope": Entry(
        lambda lr: jstep.scope(jstep.adam(lr), "fast"),
        {"fast/m": 0.0, "fast/v": 0.0},
        tuple(f"fast/{name}" for name in ADAM),
        {"fast/start_step": MADE_AT},
        rate=0.02,
    ),
    "partition": Entry(
        lambda lr: jstep.partition({"one": jstep.adagrad(lr), "other": jstep.adam(lr)}, label),
        {"one/accumulator": 0.1, "other/m": 0.0, "other/v": 0.0},
        ("one/learning_rate", *(f"other/{name}" for name in ADAM)),
        {"other/start_step": MADE_AT},
        rate=0.05,
    ),
    "with_moving_average": Entry(
        lambda lr: jstep.with_moving_average(
            jstep.adam(lr), jstep.ExponentialMovingAverage(0.9, num_updates=True)
        ),
        {EMA: "copy", **ZEROS},
        ADAM,
        AGED,
        rate=0.02,
        averages=(EMA,),
        by_step=True,
    ),
    "with_debiased_average": Entry(
        lambda lr: jstep.with_moving_average(
            jstep.momentum(lr, 0.9),
            jstep.ExponentialMovingAverage(0.9, zero_debias=True, name="average"),
        ),
        {"average": 0.0, "momentum": 0.0},
        MOMENTUM,
        AGED,
        rate=0.01,
        averages=("average",),
    ),
    "skip_nonfinite": Entry(
        lambda lr: jstep.skip_nonfinite(jstep.adam(lr)),
        ZEROS,
        ADAM,
        {"last_finite_step": MADE_AT, **AGED},
        rate=0.02,
    ),
    "everything": Entry(
        lambda lr: jstep.skip_nonfinite(
            jstep.with_moving_average(
                jstep.chain(
                    jstep.clip_gradients(by_global_norm=5.0),
                    jstep.partition(
                        {"one": jstep.momentum(lr, 0.9), "other": jstep.rmsprop(lr)}, label
                    ),
                ),
                jstep.ExponentialMovingAverage(0.9),
            )
        ),
        {EMA: "copy", "one/momentum": 0.0, "other/momentum": 0.0, "other/rms": 1.0},
        (
            "clip_by_global_norm",
            "one/learning_rate",
            "one/momentum",
            *(f"other/{name}" for name in RMSPROP),
        ),
        {"last_finite_step": MADE_AT},
        rate=0.002,
        steps=4000,
        averages=(EMA,),
        # One extra copy: the average is computed from new parameters before the guard decides
        # whether to keep them.
        copies=1.3,
    ),
}
