"""Microbatches of a sharded batch: no rows move between devices."""

import pytest
from compiled_steps import batch, compiled, loss, state
from compiled_text import collectives

import jstep

OPTIMIZER = jstep.adam(1e-3)
STEP = jstep.minimize(loss, OPTIMIZER, num_microbatches=4)


def kinds(mesh, layout):
    return set(collectives(compiled(STEP, state(OPTIMIZER, mesh, layout), *batch(mesh)).as_text()))


@pytest.mark.tpu_compiler
def test_on_tpus():
    mesh = jstep.topology("v5e:2x4")
    assert kinds(mesh, "replicated") == {"all-reduce"}
    assert not {"all-to-all", "collective-permute"} & (kinds(mesh, "zero1") | kinds(mesh, "fsdp"))
    scanned = jstep.scan_steps(STEP, 2)
    found = collectives(compiled(scanned, state(OPTIMIZER, mesh, "replicated"), *batch(mesh, 2)).as_text())
    assert set(found) == {"all-reduce"}
