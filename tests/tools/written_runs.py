"""Timelines as `train` writes them, without training."""

import json
import os

from jstep.stores.timeline import START, TIMES, VERSION

from jstep.stores.owners import this_process

ELSEWHERE = {"host": "elsewhere", "space": "", "pid": 7, "started": "1"}
NOTHING = {"since": None, "step": None, "parent": None, "peak_bytes": None, "mfu": None}
BEFORE = {**NOTHING, "wall": 0.0, "values": {}, "best": {}}
TIME = 1.7e9


def start_line(folder, start="a", prefix="model", **fields):
    line = {"kind": START, "start": start, "prefix": prefix, "begins": f"{-1:014}", "shared": 0, "version": VERSION}
    line |= {"directory": str(folder), "last_step": 100, "process": this_process() | {"pid": 2**30}, "claims": True}
    line |= {"before": BEFORE, "parent": None, "config": {"lr": 0.1}, "devices": "1×cpu", "parameters": 3}
    return line | {"time": TIME, "step": [0, 0], "seconds": {"starting": 1.0}, "time_again": TIME} | fields


def times_line(start="a", prefix="model", **fields):
    line = {"kind": TIMES, "start": start, "prefix": prefix, "begins": f"{0:014}", "shared": 0}
    line |= {"values": {"loss": 0.5}, "best": {"norm": [2.0, 8]}, "now": TIME + 9, "peak_bytes": 9, "mfu": 0.5}
    line |= {"commit": f"{'abc':40}", "end": ["finished", ""]}
    seconds = {"starting": 1.0, "stepping": 9.0}
    return line | {"time": TIME + 9, "step": [0, 10], "seconds": seconds, "time_again": TIME + 9} | fields


PROGRAM = {"stage": 0, "steps": 1, "batch": ["x: float32[2]"], "hyperparameters": {"learning_rate": 0.1}}
PROGRAM |= {"elements": {"adam": {"b1": 0.9}}, "optimizer": ["adam"], "hash": "0123456789", "operations": {"add": 1}}
PROGRAM |= {"numbers": {"1.0": 1}, "gradients": {"hash": "1", "operations": {}, "numbers": {}}}


def card_line(start="a", prefix="model", **fields):
    line = {"kind": "card", "start": start, "prefix": prefix, "card": 1, "step": 0, "versions": {"jax": "0.10"}}
    line |= {"environment": {"XLA_FLAGS": "--a=1"}, "settings": {"jax_enable_x64": False}, "devices": {"kind": "cpu"}}
    line |= {"state": {"hash": "1", "sharding": "2"}, "batches": {"hash": "1", "seed": 0}, "stages": {"0": "step"}}
    line |= {"lanes": None, "arguments": {"last_step": 100}, "config": {"lr": 0.1}, "argv": ["a"], "parent": None}
    return line | {"programs": [PROGRAM]} | fields


def write_lines(folder, *lines):
    os.makedirs(folder, exist_ok=True)
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / "timeline.jsonl").write_bytes(b"".join(line + b"\n" for line in data))


def write_run(folder, *, start=None, times=None, card=None):
    """Write the timeline of a run; the mappings replace fields of its lines."""
    first, last = start_line(folder, **(start or {})), times_line(**(times or {}))
    write_lines(folder, first, card_line(**(card or {})), last)
