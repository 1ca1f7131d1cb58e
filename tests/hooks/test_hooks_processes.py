"""Hooks with intervals in seconds on several processes: collective work is done at the same steps on all."""

import pytest
from processes import run

SCRIPT = """
import logging
class Writer:
    steps = []
    def add_summary(self, summary, global_step=None):
        self.steps.append(global_step)

class Slow(jstep.Hook):
    def after_step(self, step, state, metrics):
        time.sleep(0.002 * (1 + 3 * process))

lines = []
logging.getLogger("jstep").addHandler(type("Keep", (logging.Handler,), {"emit": lambda self, r: lines.append(r)})())
logging.getLogger("jstep").setLevel(logging.INFO)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"))
writer = Writer()
hooks = [
    Slow(), jstep.SummarySaverHook(writer, save_secs=0.1, histograms="params/*"),
    jstep.LoggingHook(every_n_steps=20, every_n_secs=0.1), jstep.StepCounterHook(every_n_secs=0.05),
]
jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, 80, hooks=hooks, batch_sharding=rows, progress=False)
print("written", *writer.steps)
print("lines", sum("loss" in line.getMessage() for line in lines))
"""


@pytest.mark.thorough
def test_histograms_by_seconds_are_written_at_the_same_steps(tmp_path):
    """Clocks differ between processes, and the state is sharded over both: one process alone would wait forever."""
    first, second = (
        {line.split()[0]: line.split()[1:] for line in lines if line.startswith(("written", "lines"))}
        for lines in run(SCRIPT, 2, tmp_path)
    )
    assert first["written"] == second["written"]
    assert len(first["written"]) > 2
    assert int(first["lines"][0]) >= 4
    assert second["lines"] == ["0"]  # only process 0 logs
