"""Entries of the modern optimizers and their building blocks."""

from optimizer_entries.classic import AGED
from optimizer_entries.entry import ADAM, ZEROS, Entry

import jstep

DECAY = ("weight_decay",)
SGD = ("dampening", "learning_rate", "momentum", "weight_decay")
FREE = ("beta1", "learning_rate", "r", "weight_decay", "weight_lr_power")
FREE_SCALARS = {**AGED, "weight_sum": 0.0, "lr_max": 0.0, "beta1": 0.9}
ADAFACTOR = (
    "clip_threshold",
    "decay_rate",
    "epsilon",
    "epsilon_scale",
    "learning_rate",
    "weight_decay",
)
FACTORS = {"v_row": "other", "v_col": "other", "v": "other"}
SOAP = {**ZEROS, **dict.fromkeys(("gg_0", "gg_1", "q_0", "q_1"), "other")}
PRODIGY_SCALARS = {**AGED, "d": 0.1, "d_max": 0.1, "d_numerator": 0.0}


def names(*more):
    return tuple(sorted((*ADAM, *more)))


def by_matrix(path, leaf):
    return "muon" if leaf.ndim == 2 else "other"


def muon_and_adamw(lr):
    return jstep.partition(
        {"muon": jstep.muon(lr), "other": jstep.adamw(lr, weight_decay=0.0)}, by_matrix
    )


def blocks_of_adamw(lr):
    return jstep.chain(
        jstep.scale_by_adam(), jstep.add_weight_decay(0.0), jstep.scale_by_learning_rate(lr)
    )


def by_nonzero_matrix(path, leaf):
    """Exclude the matrix of sharding/layouts.py that is initialized with zeros and would remain
    zero."""
    return "other" if path == "deep/y" else by_matrix(path, leaf)


def names_under(label, *names):
    return tuple(
        sorted((*(f"{label}/{name}" for name in names), *(f"other/{name}" for name in ADAM)))
    )


def slots_under(label, slots):
    return {
        **{f"{label}/{name}": value for name, value in slots.items()},
        "other/m": 0.0,
        "other/v": 0.0,
    }


MODERN = {
    "sgd": Entry(jstep.sgd, {}, SGD, rate=0.02),
    "sgd_nesterov": Entry(
        lambda lr: jstep.sgd(lr, 0.9, use_nesterov=True), {"momentum": 0.0}, SGD, rate=0.01
    ),
    "sgd_dampening": Entry(
        lambda lr: jstep.sgd(lr, 0.9, 0.5), {"momentum": 0.0}, SGD, AGED, rate=0.01
    ),
    "sgd_decay": Entry(
        lambda lr: jstep.sgd(lr, 0.9, use_nesterov=True, weight_decay=1e-5),
        {"momentum": 0.0},
        SGD,
        rate=0.01,
    ),
    "adamw": Entry(
        lambda lr: jstep.adamw(lr, weight_decay=1e-5), ZEROS, names(*DECAY), AGED, rate=0.02
    ),
    "adamw_amsgrad": Entry(
        lambda lr: jstep.adamw(lr, weight_decay=0.0, amsgrad=True),
        {**ZEROS, "v_max": 0.0},
        names(*DECAY),
        AGED,
        rate=0.02,
        steps=4000,
    ),
    "lion": Entry(
        jstep.lion,
        {"m": 0.0},
        ("beta1", "beta2", "learning_rate", "weight_decay"),
        rate=0.002,
        steps=4000,
        slope=False,
    ),
    "adafactor": Entry(
        lambda lr: jstep.adafactor(lr, min_dim_size_to_factor=1),
        FACTORS,
        ADAFACTOR,
        AGED,
        rate=0.01,
        copies=1.1,
        steps=4000,
    ),
    "adafactor_momentum": Entry(
        lambda lr: jstep.adafactor(
            lr, momentum=0.5, scale_parameter=False, min_dim_size_to_factor=1
        ),
        {**FACTORS, "m": 0.0},
        (*ADAFACTOR[:-1], "momentum", "weight_decay"),
        AGED,
        rate=0.01,
        steps=4000,
        copies=1.1,
    ),
    "muon": Entry(
        muon_and_adamw,
        {"muon/momentum": 0.0, "other/m": 0.0, "other/v": 0.0},
        tuple(
            sorted(
                (
                    *(
                        f"muon/{name}"
                        for name in ("epsilon", "learning_rate", "momentum", "weight_decay")
                    ),
                    *(f"other/{name}" for name in names(*DECAY)),
                )
            )
        ),
        {"other/start_step": AGED["start_step"]},
        rate=0.02,
        copies=4.1,
    ),
    "schedule_free_adamw": Entry(
        jstep.schedule_free_adamw,
        {"v": 0.0, "z": "copy"},
        tuple(sorted((*FREE, "beta2", "epsilon"))),
        FREE_SCALARS,
        rate=0.1,
        steps=6000,
    ),
    "schedule_free_sgd": Entry(
        jstep.schedule_free_sgd, {"z": "copy"}, FREE, FREE_SCALARS, rate=0.05, steps=6000
    ),
    "nadam": Entry(jstep.nadam, ZEROS, names(*DECAY), AGED, rate=0.02),
    "nadam_growing": Entry(
        lambda lr: jstep.nadam(lr, momentum_decay=0.004),
        ZEROS,
        names("momentum_decay", *DECAY),
        {**AGED, "mu_product": 1.0},
        rate=0.02,
    ),
    "radam": Entry(jstep.radam, ZEROS, names("threshold", *DECAY), AGED, rate=0.01),
    "lamb": Entry(jstep.lamb, ZEROS, names(*DECAY), AGED, rate=0.01, copies=1.1, steps=0),
    "lars": Entry(
        lambda lr: jstep.lars(lr, trust_coefficient=0.1),
        {"momentum": 0.0},
        ("epsilon", "learning_rate", "momentum", "trust_coefficient", "weight_decay"),
        rate=0.01,
        copies=1.1,
        steps=0,
    ),
    "soap": Entry(
        lambda lr: jstep.soap(lr, weight_decay=0.0, precondition_frequency=2),
        SOAP,
        names("shampoo_beta", *DECAY),
        AGED,
        rate=0.02,
        copies=9.0,
        idle=1,
        matching_steps=0,
    ),
    "prodigy": Entry(
        lambda lr: jstep.prodigy(lr, d0=0.1),
        {**ZEROS, "s": 0.0, "p0": "copy"},
        names("d0", "d_coef", *DECAY),
        PRODIGY_SCALARS,
        rate=0.5,
        matching_steps=5,
    ),
    "ademamix": Entry(
        lambda lr: jstep.ademamix(lr, beta3=0.99, alpha=2.0),
        {"m1": 0.0, "m2": 0.0, "v": 0.0},
        names("alpha", "beta3", *DECAY),
        AGED,
        rate=0.01,
        steps=4000,
    ),
    "adadelta": Entry(
        lambda lr: jstep.adadelta(lr, epsilon=1e-2),
        {"accum": 0.0, "accum_update": 0.0},
        ("epsilon", "learning_rate", "rho"),
        rate=0.1,
        steps=0,
    ),
    "adamax": Entry(jstep.adamax, ZEROS, ADAM, AGED, rate=0.02),
    "adabelief": Entry(jstep.adabelief, ZEROS, names("epsilon_root"), AGED, rate=0.02),
    "yogi": Entry(jstep.yogi, {"m": 1e-6, "v": 1e-6}, ADAM, AGED, rate=0.02),
    "novograd": Entry(
        jstep.novograd,
        {"m": 0.0, "v": "scalar"},
        names(*DECAY),
        AGED,
        rate=0.002,
        copies=1.1,
        steps=4000,
    ),
    "signum": Entry(
        jstep.signum, {"m": 0.0}, ("beta", "learning_rate"), rate=0.002, steps=4000, slope=False
    ),
    "adan": Entry(
        jstep.adan, {**ZEROS, "d": 0.0, "previous": 0.0}, names("beta3", *DECAY), AGED, rate=0.02
    ),
    "adopt": Entry(
        jstep.adopt, ZEROS, ADAM, AGED, rate=0.02, steps=4000, idle=1, matching_steps=10
    ),
    "madgrad": Entry(
        jstep.madgrad,
        {"s": 0.0, "grad_sum_sq": 0.0, "initial": "copy"},
        ("epsilon", "learning_rate", "momentum", "weight_decay"),
        AGED,
        rate=0.02,
    ),
    "adamh": Entry(
        lambda lr: jstep.partition(
            {
                "muon": jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(lr)),
                "other": jstep.adam(lr),
            },
            by_nonzero_matrix,
        ),
        slots_under("muon", ZEROS),
        names_under("muon", *ADAM),
        {"muon/start_step": AGED["start_step"], "other/start_step": AGED["start_step"]},
        rate=0.02,
        steps=0,
        copies=1.1,
    ),
    "normuon": Entry(
        lambda lr: jstep.partition(
            {
                "muon": jstep.chain(
                    jstep.trace(0.95, use_nesterov=True),
                    jstep.orthogonalize(),
                    jstep.normalize_neurons(),
                    jstep.add_weight_decay(0.0),
                    jstep.scale_by_learning_rate(lr),
                ),
                "other": jstep.adam(lr),
            },
            by_matrix,
        ),
        slots_under("muon", {"momentum": 0.0, "neuron_v": "other"}),
        names_under(
            "muon",
            "epsilon",
            "learning_rate",
            "momentum",
            "neuron_beta2",
            "neuron_epsilon",
            "weight_decay",
        ),
        {"other/start_step": AGED["start_step"]},
        rate=0.02,
        copies=4.1,
    ),
    "normuonh": Entry(
        lambda lr: jstep.partition(
            {
                "muon": jstep.chain(
                    jstep.trace(0.95, use_nesterov=True),
                    jstep.orthogonalize(
                        ns_coefficients="polar_express", scale=None, normalization="schatten"
                    ),
                    jstep.normalize_neurons(over="short"),
                    jstep.on_hyperball(lr, 1.5),
                ),
                "other": jstep.adam(lr),
            },
            by_nonzero_matrix,
        ),
        slots_under("muon", {"momentum": 0.0, "neuron_v": "other"}),
        names_under(
            "muon",
            "epsilon",
            "learning_rate",
            "momentum",
            "neuron_beta2",
            "neuron_epsilon",
            "radius",
        ),
        {"other/start_step": AGED["start_step"]},
        rate=0.02,
        steps=0,
        copies=4.6,
    ),
    "blocks_adamw": Entry(blocks_of_adamw, ZEROS, names(*DECAY), AGED, rate=0.02),
    "blocks_lion": Entry(
        lambda lr: jstep.chain(jstep.scale_by_lion(), jstep.scale_by_learning_rate(lr)),
        {"m": 0.0},
        ("beta1", "beta2", "learning_rate"),
        rate=0.002,
        steps=4000,
        slope=False,
    ),
    "blocks_trace": Entry(
        lambda lr: jstep.chain(
            jstep.trace(0.9, use_nesterov=True), jstep.scale_by_learning_rate(lr)
        ),
        {"momentum": 0.0},
        ("learning_rate", "momentum"),
        rate=0.01,
    ),
    "blocks_rms": Entry(
        lambda lr: jstep.chain(
            jstep.scale_by_rms(), jstep.scale(1.0), jstep.scale_by_learning_rate(lr)
        ),
        {"rms": 0.0},
        ("decay", "epsilon", "factor", "learning_rate"),
        rate=0.002,
        steps=4000,
    ),
}
