"""Cost of a step that does not fit into memory; values that the compiler does not report are None."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep
from jstep.tools.cost import _needed

OPTIMIZER = jstep.adam(0.01)
STEP = jstep.minimize(lambda params, x: jnp.sum((x @ params["w"]) ** 2), OPTIMIZER)
OLD = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.62G) exceeds "
    "available HBM (15.75G)."
)
NEW = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required (512.5M) "
    "exceeds available HBM (256.0M). HLO module: jit_f.\nSee https://openxla.org/xla/errors/error_1000 for more."
)


@pytest.mark.parametrize(
    ("text", "needed"),
    [(OLD, (int(16.62 * 2**30), int(15.75 * 2**30))), (NEW, (int(512.5 * 2**20), 256 * 2**20)), ("INTERNAL: no", None)],
    ids=["old", "new", "other"],
)
def test_memory_is_parsed_from_the_error(text, needed):
    assert _needed(jax.errors.JaxRuntimeError(text)) == needed


class FailingStep:
    """A step whose compilation fails."""

    def __init__(self, step, text):
        self.step, self.text = step, text

    def __call__(self, state, *args):
        return self.step(state, *args)

    def trace(self, state, *args):
        return self.step.trace(state, *args)

    def lower(self, state, *args):
        return self

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.text)


def example_inputs():
    state = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.zeros((16, 8))}, OPTIMIZER))
    return state, jax.ShapeDtypeStruct((4, 16), jnp.float32)


def test_out_of_memory_returns_a_cost():
    cost = jstep.cost(FailingStep(STEP, OLD), *example_inputs())
    assert cost.fits is False
    assert (cost.peak_bytes, cost.memory_bytes) == (int(16.62 * 2**30), int(15.75 * 2**30))
    assert cost.params_bytes == 4 * 16 * 8
    assert cost.slots_bytes == 2 * 4 * 16 * 8 + 4
    assert cost.flops >= 2 * 2 * 4 * 16 * 8
    assert "16.6 GiB of 15.75 GiB: it does not fit" in str(cost)
    assert "None" not in str(cost)
    unknown = [field.name for field in dataclasses.fields(cost) if getattr(cost, field.name) is None]
    assert set(unknown) >= {"bytes_accessed", "temp_bytes", "output_bytes", "alias_bytes"}


def test_other_compiler_errors_are_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="the compiler broke"):
        jstep.cost(FailingStep(STEP, "INTERNAL: the compiler broke"), *example_inputs())


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "warns"), [(P("data"), True), (P(), False)], ids=str)
@pytest.mark.parametrize("is_constrained", [False, True])
def test_warning_about_a_possible_reason(spec, warns, is_constrained):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    def loss(params, tokens):
        x = params["w"][tokens]
        x = jax.lax.with_sharding_constraint(x, rows) if is_constrained else x
        return jnp.sum(x**2)

    state = jstep.TrainState.create(lambda: {"w": jnp.zeros((16, 8))}, OPTIMIZER, mesh=mesh, param_specs=spec)
    tokens = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=rows)
    cost = jstep.cost(FailingStep(jstep.minimize(loss, OPTIMIZER), OLD), state, tokens)
    assert bool(cost.warnings) == (warns and not is_constrained)
    if cost.warnings:
        assert 'with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("data")))' in cost.warnings[0]
        assert "warning: parameters are split" in str(cost)
