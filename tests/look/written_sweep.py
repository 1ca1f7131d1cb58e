"""Many runs as `train` leaves them, with event files, without training."""

import math
import random

from written_runs import PROGRAM, TIME, write_run

from jstep.stores.event_files import frame, proto
from jstep.stores.owners import this_process


def write_run_of_sweep(folder, config, scalars, *, rate=0.1, **fields):
    """Write a run whose event file has `scalars`: tag → values, at steps 0, 10, …"""
    folder.mkdir(parents=True, exist_ok=True)
    length = max(map(len, scalars.values()), default=1)
    arguments = {
        "last_step": 10 * length,
        "logdir": str(folder),
        "hooks": ["EvaluationHook(validation)"],
    }
    program = PROGRAM | {"hyperparameters": {"learning_rate": rate}}
    setup = {"arguments": arguments, "programs": [program]}
    own = {
        "config": config,
        "last_step": 10 * length,
        "logdir": str(folder),
        "step": [0, 10 * length],
    }
    write_run(folder, setup_fields=setup, **{**own, "values": {}, **fields})
    events = [proto("Event")(wall_time=TIME, file_version="brain.Event:2")]
    for i in range(length):
        event = proto("Event")(wall_time=TIME + 2 * i, step=10 * i)
        for tag, values in scalars.items():
            if i < len(values):
                event.summary.value.add(tag=tag, simple_value=values[i])
        events.append(event)
    name = f"events.out.tfevents.{int(TIME)}.{this_process()['host']}.{2**30}.0"
    (folder / name).write_bytes(b"".join(frame(event.SerializeToString()) for event in events))


def losses(least, length=30):
    return [least + 4.0 * math.exp(-i / 6) for i in range(length)]


LONG = "an-option-that-nobody-can-read-" * 3


def write_sweep(above, count, length=30, norms=2):
    """Write runs of many kinds: seeds, branches, NaN, failures, no evaluation, other metrics,
    markup, long texts."""
    draw = random.Random(count)
    for i in range(count):
        of_group = random.Random(i // 3) if i // 3 % 3 == 0 else draw
        config = {
            "optimizer/name": of_group.choice(["adam", "sgd", "lion"]),
            "optimizer/lr": 10 ** of_group.uniform(-4, -1),
        }
        config |= {"width": of_group.choice([128, 256, 512]), "seed": i % 3}
        config["note"] = LONG if of_group.random() < 0.5 else "<script>alert(1)</script>"
        if i % 8 == 7:
            del config["seed"]
        curve = losses(
            1.5 + abs(math.log10(config["optimizer/lr"]) + 2.5) + draw.gauss(0, 0.03), length
        )
        if i % 13 == 5:
            curve[length // 2 :] = [math.nan] * (length - length // 2)
        scalars = {"loss": curve[: length // 2] if i % 10 == 9 else curve}
        if i % 9 != 8:
            scalars["validation/loss"] = [value + 0.1 for value in curve[::3]]
        scalars |= {
            f"layer{n}/norm": [abs(draw.gauss(1, 0.1)) for _ in curve] for n in range(norms)
        }
        if i % 17 == 3:
            scalars["other"] = [value**2 for value in curve]
        end = ["failed", "ValueError: " + "why " * 60] if i % 12 == 11 else ["finished", ""]
        parent = {"path": f"{above}/run-000/model-50", "step": 50} if i in (4, 5) else None
        name = f"run-{i:03}-{LONG}" if i == 3 else f"run-{i:03}"
        last = {
            tag: repr(values[-1]) if math.isnan(values[-1]) else values[-1]
            for tag, values in scalars.items()
        }
        write_run_of_sweep(
            above / name, config, scalars, run=f"{i:08x}", parent=parent, end=end, values=last
        )
