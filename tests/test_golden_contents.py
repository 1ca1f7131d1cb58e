"""What files can hold, by the lists that `formats.txt` is made of: each of it is in a golden run of
this version.

What a release has written can only be read later if its golden runs have it; after the release
nothing is added.
"""

import json
from collections.abc import Iterable, Mapping

from test_golden import GOLDEN, VERSIONS

import jstep
from jstep.array_store import manifest
from jstep.data import positions
from jstep.evaluating.callbacks import MetricCallback
from jstep.hooks import hook_states, run_extra
from jstep.record import schema
from jstep.stores import tagged_arrays, tagged_json

RUNS = GOLDEN / VERSIONS[-1]
HOOKS = (jstep.EvaluationHook, MetricCallback, jstep.KeepBest, jstep.History)
"""The built-in hooks and callbacks with a state."""
LEFT_OUT = {
    "tag $tensor": "torch is not installed where they are written",
    "leaf notes": "for later versions",
    "left-out leaf notes": "for later versions",
    "retention notes": "for later versions",
    "record of hooks notes": "for later versions",
    "state of a hook notes": "for later versions",
    "Start problem": "made by the reader",
    "Start setup": "made by the reader",
    "Start commit": "it would be that of this repository",
    "Start edits": "they would be those of this repository",
    "extra code": "it would be that of this repository",
    "Start peak_bytes": "CPUs do not tell it",
    "Start mfu": "CPUs do not tell it",
    "Start exception": "no start of theirs fails",
    "Start other_batch": "their loaders are complete",
    "ProcessRecord signal": "none of their processes is stopped by a signal",
    "state of EvaluationHook interrupted_step": "none of their evaluations is interrupted",
    "state of MetricCallback stopped_at": "none of their callbacks stops a run",
    "state of History sums": "their last step is one of its rows",
    "state of History newest": "their last step is one of its rows",
    "extra last_body": "all of their bodies are due at the last step",
}
"""What no golden run has, and why."""


def present(kind: str, records: Iterable[Mapping[str, object]]) -> set[str]:
    """Return the fields that a record has with a value that says something."""
    return {
        f"{kind} {name}"
        for record in records
        for name, value in record.items()
        if value not in (None, "", [], {})
    }


def walk(value: object) -> Iterable[object]:
    yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from walk(item)


def loaded(pattern: str) -> list[dict[str, object]]:
    return [json.loads(path.read_bytes()) for path in sorted(RUNS.glob(pattern))]


def can_be_written() -> set[str]:
    kinds: dict[str, Iterable[str]] = {
        "manifest": manifest._MANIFEST_KEYS,
        "leaf": manifest._LEAF_KEYS,
        "left-out leaf": manifest._LEFT_OUT_KEYS,
        "retention": manifest._RETENTION_KEYS,
        "extra": run_extra.SCHEMA,
        "position": ("value", positions._BATCHES_SINCE),
        "tag": (*tagged_json._DECODERS, tagged_json._FILE),
        "array": tagged_arrays._ARRAY_PARTS,
        "array of JAX": ("data", "impl", "weak"),
        "record of hooks": hook_states._RECORD_KEYS,
        "state of a hook": hook_states._STATE_KEYS,
        "kind of file": ("event file", "history", "fingerprints", "mark of a bucket"),
    }
    for record in (
        *(
            schema.Start,
            schema.Process,
            schema.Parent,
            schema.Stall,
            schema.KeepBestRecord,
            schema.StateChange,
        ),
        *(
            schema.ProcessRecord,
            schema.SetupFile,
            schema.Setup,
            schema.SetupProgram,
            schema.StallFile,
        ),
    ):
        kinds[record.__name__] = record.__annotations__
    for hook in HOOKS:
        kinds[f"state of {hook.__name__}"] = hook_states._FORMATS[hook].defaults
    return {f"{kind} {name}" for kind, names in kinds.items() for name in names}


def is_written() -> set[str]:
    manifests = loaded("**/manifest.json")
    extras = [
        extra
        for extra in (found["extra"] for found in manifests)
        if isinstance(extra, dict) and "run" in extra
    ]
    values = [*extras, *positions_of_processes()]
    found = present("manifest", manifests)
    found |= present("leaf", (leaf for one in manifests for leaf in one["leaves"]))
    # Its value is None where it is written.
    found |= {"leaf array" for one in manifests for leaf in one["leaves"] if "array" in leaf}
    found |= present(
        "left-out leaf", (leaf for one in manifests for leaf in one.get("left_out", ()))
    )
    found |= present("retention", (one["retention"] for one in manifests))
    found |= present("extra", extras)
    found |= present("position", (extra["batches"] for extra in extras if "batches" in extra))
    for value in values:
        for item in walk(value):
            if isinstance(item, dict) and len(item) == 1 and next(iter(item))[:1] == "$":
                ((tag, parts),) = item.items()
                found.add(f"tag {tag}")
                if tag == "$array":
                    found |= present("array", [parts])
                if tag == "$jax":
                    found |= present("array of JAX", [parts])
    records = [extra["hooks"] for extra in extras if "hooks" in extra]
    found |= present("record of hooks", records)
    items = [item for record in records for item in walk(record)]  # with those of callbacks
    found |= present(
        "state of a hook", (item for item in items if isinstance(item, dict) and "class" in item)
    )
    found |= states_of_hooks(records)
    return found | records_of_starts() | kinds_of_files()


def positions_of_processes() -> list[object]:
    with jstep.Saver(RUNS / "odd_processes") as saver:
        return [
            json.loads(saver.read_file(f"position.process_{process}", 6)) for process in range(2)
        ]


def states_of_hooks(records: Iterable[object]) -> set[str]:
    found: set[str] = set()
    for saved in (item for record in records for item in walk(record)):
        if not isinstance(saved, dict) or not isinstance(saved.get("class"), str):
            continue
        kind = getattr(jstep, saved["class"].rpartition(".")[2], object)
        for base in kind.__mro__:
            if base in HOOKS:
                found |= present(f"state of {base.__name__}", [saved["state"]])
                break
    return found


def records_of_starts() -> set[str]:
    starts = loaded("*/starts/*.00000?.json")
    others = loaded("*/starts/*.1.json")
    setups = loaded("*/starts/*.card.json")
    found = (
        present("Start", starts) | present("ProcessRecord", others) | present("SetupFile", setups)
    )
    found |= present("Process", (record["process"] for record in (*starts, *others)))
    found |= present("Parent", (start["parent"] for start in starts if start["parent"]))
    found |= present("Stall", (stall for start in starts for stall in start["stalls"]))
    found |= present(
        "KeepBestRecord", (kept for start in starts for kept in start["kept"].values())
    )
    found |= present(
        "StateChange", (change for start in starts for change in start["state_changes"])
    )
    found |= present("Setup", (setup["card"] for setup in setups))
    found |= present(
        "SetupProgram", (program for setup in setups for program in setup["card"]["programs"])
    )
    return found | present("StallFile", loaded("*/stalls/*.json"))


def kinds_of_files() -> set[str]:
    names = {
        "event file": "*/logs/*tfevents*",
        "history": "*/history.jsonl",
        "fingerprints": "*/fingerprints.jsonl",
        "mark of a bucket": "bucket/~jstep.2*",
    }
    return {f"kind of file {name}" for name, pattern in names.items() if list(RUNS.glob(pattern))}


def test_each_thing_that_files_can_hold_is_in_a_golden_run() -> None:
    missing = can_be_written() - is_written()
    assert missing == set(LEFT_OUT), (
        "add it to golden_runs.py, and write the runs of this version (dev/README.md)"
    )
