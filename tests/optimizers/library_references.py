"""Trajectories of torch, schedulefree and pytorch_optimizer, which are imported when one is
computed."""

import warnings

from golden import DECAY, RATE, SHAPES, STEPS, gradients, initial_params, run_torch

COMPARED = (0, 1, 2, 5, STEPS - 1)
"""The steps after which the parameters are compared."""
MATRICES = {"a": (4, 6), "b": (6, 4)}
SQUARE, WIDE = {"a": (5,), "b": (4, 4), "c": ()}, {"a": (5,), "b": (4, 5), "c": ()}
CHANGING = {"lr": RATE, "weight_decay": DECAY}
ADAM = {"betas": (0.9, 0.99), "eps": 1e-6}


def of_torch(make, hyper, shapes=SHAPES):
    """Return a function that runs `make(torch.optim, groups)`."""

    def run():
        import torch

        return run_torch(lambda groups: make(torch.optim, groups), hyper, shapes)

    return run


def schedule_free(name, warmup, power):
    """Return a function that runs an optimizer of schedulefree; its averages follow the
    trajectory."""

    def run():
        import schedulefree

        created = []
        more = {"weight_decay": 0.1, "warmup_steps": warmup, "r": 0.5, "weight_lr_power": power}

        def make(groups):
            arguments = {"betas": (0.9, 0.99)} if name == "AdamWScheduleFree" else {"momentum": 0.9}
            created.append(getattr(schedulefree, name)(groups, 0.1, **arguments, **more))
            created[0].train()
            return created[0]

        trajectory = run_torch(make, {})
        created[0].eval()
        averages = [group["params"][0].detach().numpy() for group in created[0].param_groups]
        return [*trajectory, dict(zip(SHAPES, averages, strict=True))]

    return run


def prodigy(guard):
    """Return a function that runs pytorch_optimizer's Prodigy, whose parameters are in one
    group."""

    def run():
        import pytorch_optimizer
        import torch

        tensors = {
            n: torch.nn.Parameter(torch.tensor(x, dtype=torch.float32))
            for n, x in initial_params().items()
        }
        more = {
            "growth_rate": 1.5,
            "safeguard_warmup": guard,
            "weight_decay": 0.1,
            "weight_decouple": True,
        }
        optimizer = pytorch_optimizer.Prodigy(tensors.values(), lr=0.7, d0=1e-2, **more)
        trajectory = []
        for n in range(STEPS):
            for name, grad in gradients(n).items():
                tensors[name].grad = torch.tensor(grad, dtype=torch.float32)
            optimizer.step()
            trajectory.append(
                {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
            )
        return trajectory

    return run


def of_pytorch_optimizer(name, shapes=SHAPES, **arguments):
    """Return a function that runs an optimizer of pytorch_optimizer with constant weight decay of
    all leaves."""

    def run():
        import pytorch_optimizer

        def make(groups):
            return getattr(pytorch_optimizer, name)(
                [{**group, "weight_decay": 0.1} for group in groups], **arguments
            )

        return run_torch(make, {"lr": RATE}, shapes)

    return run


REFERENCES = {
    "sgd": of_torch(lambda t, g: t.SGD(g, 0.1), CHANGING),
    "sgd-momentum": of_torch(lambda t, g: t.SGD(g, 0.1, momentum=0.9, dampening=0.3), CHANGING),
    "sgd-nesterov": of_torch(lambda t, g: t.SGD(g, 0.1, momentum=0.9, nesterov=True), CHANGING),
    "adamw": of_torch(lambda t, g: t.AdamW(g, 0.1, **ADAM), CHANGING),
    "amsgrad": of_torch(lambda t, g: t.AdamW(g, 0.1, **ADAM, amsgrad=True), CHANGING),
    "nadam": of_torch(
        lambda t, g: t.NAdam(g, 0.1, **ADAM, momentum_decay=0.004, decoupled_weight_decay=True),
        CHANGING,
    ),
    "adamax": of_torch(lambda t, g: t.Adamax(g, 0.1, **ADAM), {"lr": RATE}),
    "rprop": of_torch(lambda t, g: t.Rprop(g, 0.05), {}),
    "muon": of_torch(lambda t, g: t.Muon(g, adjust_lr_fn="match_rms_adamw"), CHANGING, MATRICES),
    "prodigy": prodigy(False),
    "prodigy-guard": prodigy(True),
    "soap": of_pytorch_optimizer(
        "SOAP", SQUARE, precondition_frequency=3, max_precondition_dim=10000
    ),
    "soap-wide": of_pytorch_optimizer(
        "SOAP", WIDE, precondition_frequency=3, max_precondition_dim=4
    ),
    "adan": of_pytorch_optimizer("Adan", betas=(0.98, 0.92, 0.99), weight_decouple=False),
}
for _kind, _name in (("adamw", "AdamWScheduleFree"), ("sgd", "SGDScheduleFree")):
    for _warmup, _power in ((0, 2.0), (0, 1.0), (4, 2.0), (4, 1.0)):
        REFERENCES[f"free-{_kind}-{_warmup}-{_power}"] = schedule_free(_name, _warmup, _power)


def computed(name):
    """Return the parameters of a reference after the steps COMPARED, and what follows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trajectory = REFERENCES[name]()
    return [trajectory[n] for n in COMPARED] + trajectory[STEPS:]
