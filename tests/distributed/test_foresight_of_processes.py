"""What a run of two processes logs of its steps: one line for all processes, and no process waits for another."""

import pytest
from processes import run

RUN = """
import logging

seen = []
handler = logging.Handler(logging.INFO)
handler.emit = lambda record: seen.append(record.getMessage())
logging.getLogger("jstep").addHandler(handler)
logging.getLogger("jstep").setLevel(logging.INFO)

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, P("data"))
ema = jstep.ExponentialMovingAverage(0.9, name=sys.argv[5], follows=sys.argv[5])
table = jax.device_put(jnp.linspace(0.02, 0.0, 5), NamedSharding(mesh, P()))  # of all processes
rate = lambda step: table[jnp.minimum(step, 4)]
inner = jstep.update_every(4, jstep.with_moving_average(jstep.adam(rate), ema), accumulate=True)
optimizer = jstep.skip_nonfinite(inner)
state = jstep.TrainState.create(init, optimizer, mesh=mesh, param_specs=P("data"))
steps = {0: jstep.minimize(loss_fn, optimizer), 3: jstep.minimize(loss_fn, optimizer, var_list="w")}
state = jstep.train(steps, state, batches, 10, batch_sharding=rows, progress=False)
for word in ("learning rate is 0 from step 4", "no longer trains 'b'", "follow the step", "gradients of 3 steps"):
    print(sum(word in line for line in seen), word, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("follows", ["updates", "step"])
def test_lines_about_the_steps_of_two_processes(tmp_path, follows):
    first, second = run(RUN, 2, tmp_path, follows)
    is_left = int(follows == "updates")
    words = ["learning rate is 0 from step 4", "no longer trains 'b'", "follow the step", "gradients of 3 steps"]
    assert [line for line in first if line[1:2] == " "] == [
        f"{n} {word}" for n, word in zip([1, is_left, 0, 1], words, strict=True)
    ]
    assert [line for line in second if line[1:2] == " "] == [f"0 {word}" for word in words]
