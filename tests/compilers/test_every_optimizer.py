"""Every optimizer compiles for TPUs and GPUs without warnings, with the state donated and no excess
collectives."""

import jax
import pytest
from compiled_steps import LAYOUTS, batch, check, compiled, loss, params, state, total_bytes
from compiled_text import collectives
from optimizer_table import TABLE

import jstep

OTHERS = {
    "rprop": lambda: jstep.rprop(1e-3),
    "scale_by_trust_ratio": lambda: jstep.chain(
        jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(1e-3)
    ),
    "orthogonalize": lambda: jstep.partition(
        {
            "matrix": jstep.chain(jstep.orthogonalize(), jstep.scale_by_learning_rate(1e-3)),
            "rest": jstep.adam(1e-3),
        },
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "rest",
    ),
}
MAKERS = {name: lambda entry=entry: entry.make(1e-3) for name, entry in TABLE.items()} | OTHERS

# Newton–Schulz and power iterations multiply sharded matrices repeatedly.
MATRICES = {name for name in MAKERS if "muon" in name or "orthogonalize" in name or "soap" in name}
ON_GPU = (
    *("gradient_descent", "momentum", "adam", "adamw", "adafactor", "lamb", "muon"),
    *("clip_by_global_norm", "master_weights", "everything", "skip_nonfinite", "partition", "soap"),
)


def check_collectives(name, layout, program, shapes):
    check(program, shapes)
    found, param_bytes = collectives(program.as_text()), total_bytes(jax.eval_shape(params))
    total = sum(one.bytes for one in found.values())
    assert "all-to-all" not in found or found["all-to-all"].bytes < 0.1 * param_bytes, found
    # One reduction of all gradients; sharded slots or parameters add one gather of all parameters,
    # FSDP another one.
    expected = {"replicated": 1.0, "zero1": 2.0, "fsdp": 3.0}[layout]
    if name in MATRICES and layout != "replicated":
        # Matrices are gathered for the products: all slots once, parameters and gradients up to
        # four times.
        expected = max(12.0, 4.0 + total_bytes(shapes.slots) / param_bytes)
        number = sum(one.number for one in found.values())
        assert number < 100, found
    assert total <= 1.1 * expected * param_bytes, (found, param_bytes)
    if layout == "replicated":
        assert set(found) == {"all-reduce"}, found
        assert found["all-reduce"].bytes <= 1.02 * param_bytes, (found, param_bytes)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", MAKERS)
def test_on_tpus(name):
    mesh = jstep.topology("v5e:2x4")
    for layout in LAYOUTS:
        optimizer = MAKERS[name]()
        shapes = state(optimizer, mesh, layout)
        check_collectives(
            name, layout, compiled(jstep.minimize(loss, optimizer), shapes, *batch(mesh)), shapes
        )


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", [name for name in ON_GPU if name in MAKERS])
def test_on_gpus(name):
    mesh = jstep.topology("h100:8")
    for layout in LAYOUTS:
        optimizer = MAKERS[name]()
        shapes = state(optimizer, mesh, layout)
        check_collectives(
            name, layout, compiled(jstep.minimize(loss, optimizer), shapes, *batch(mesh)), shapes
        )
