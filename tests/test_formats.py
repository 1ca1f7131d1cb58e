"""`formats.txt`: the number of each kind of file beside its fields, keys and tags.

Who changes one of them changes the file on purpose: `python tests/test_formats.py` writes it. If
the previous release would misread what is written now, the number of this kind goes up, and
docs/how/compatibility.md says since when.
"""

import pathlib
import sys
import types
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jstep
from jstep.array_store import manifest
from jstep.evaluating.callbacks import MetricCallback
from jstep.hooks import hook_states, run_extra
from jstep.logs import fingerprint_log
from jstep.record import process_files, schema, stall_files, starts
from jstep.stores import objects, tagged_arrays, tagged_json

FILE = pathlib.Path(__file__).with_name("formats.txt")


def fields_of(kind: object) -> list[str]:
    """Return the fields of a record of `schema.py`, with their types."""
    return [f"{name}: {_as_typed(hint)}" for name, hint in typing.get_type_hints(kind).items()]


def _as_typed(hint: object) -> str:
    origin = typing.get_origin(hint)
    parts = [_as_typed(part) for part in typing.get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(parts)
    name = "None" if hint is type(None) else getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(parts)}]" if parts else name


def formats() -> Iterator[tuple[str, object, list[str]]]:
    """Yield each kind of file, its number, and what it has."""
    yield "manifest", manifest.FORMAT, sorted(manifest._MANIFEST_KEYS)
    yield "manifest, a leaf", manifest.FORMAT, sorted(manifest._LEAF_KEYS)
    yield "manifest, a leaf that was left out", manifest.FORMAT, sorted(manifest._LEFT_OUT_KEYS)
    yield "manifest, the retention", manifest.FORMAT, sorted(manifest._RETENTION_KEYS)
    yield "manifest, the extra of a run", manifest.FORMAT, sorted(run_extra.SCHEMA)
    yield "database of arrays", manifest.DATABASE, ["OCDBT", "zarr3", "bytes", "crc32c"]
    yield "tagged values", manifest.TAGS_FORMAT, sorted([*tagged_json._DECODERS, tagged_json._FILE])
    yield "tagged values, an array", manifest.TAGS_FORMAT, sorted(tagged_arrays._ARRAY_PARTS)
    key = tagged_arrays.jax_parts(jax.random.key(0))["$jax"]
    yield "tagged values, an array of JAX", manifest.TAGS_FORMAT, sorted(key)
    yield "record of hooks' states", hook_states.RECORD_FORMAT, sorted(hook_states._RECORD_KEYS)
    yield (
        "record of hooks' states, a state",
        hook_states.RECORD_FORMAT,
        sorted(hook_states._STATE_KEYS),
    )
    for hook in (jstep.EvaluationHook, MetricCallback, jstep.KeepBest, jstep.History):
        state = hook_states._FORMATS[hook]
        yield (
            f"state of {hook.__name__}",
            state.number,
            [f"{name}={value!r}" for name, value in state.defaults.items()],
        )
    for kind in (
        schema.Start,
        schema.Process,
        schema.Parent,
        schema.Stall,
        schema.KeepBestRecord,
        schema.StateChange,
    ):
        yield f"starts, {kind.__name__}", starts.VERSION, fields_of(kind)
    yield "starts, ProcessRecord", process_files.PROCESS_VERSION, fields_of(schema.ProcessRecord)
    for kind in (schema.SetupFile, schema.Setup, schema.SetupProgram):
        yield f"setups, {kind.__name__}", starts.SETUP_VERSION, fields_of(kind)
    yield "stalls", stall_files.STALLS_VERSION, fields_of(schema.StallFile)
    yield "history", 1, ["step", "the metrics"]
    yield "fingerprints", 1, sorted(fingerprint_log._KEYS)
    yield "index of a bucket", objects.INDEX_FORMAT, [objects.MARK, objects.INDEX]
    yield from slots()


def slots() -> Iterator[tuple[str, object, list[str]]]:
    """Yield the names of the slots of each optimizer, with the dtypes in which they are stored."""
    sys.path.insert(0, str(FILE.parent))
    from optimizer_table import TABLE

    for name, entry in TABLE.items():
        params = {"w": jnp.ones((8, 4), jnp.bfloat16), "b": jnp.ones(4)}
        shapes = jax.eval_shape(entry.make(0.1).init, params)
        kinds = {
            slot: sorted({str(leaf.dtype) for leaf in jax.tree.leaves(tree)})
            for slot, tree in shapes.items()
        }
        yield (
            f"slots of {name}",
            manifest.FORMAT,
            [f"{slot} {' '.join(dtypes)}" for slot, dtypes in kinds.items()],
        )


def text() -> str:
    return "".join(f"{kind} | {number} | {', '.join(parts)}\n" for kind, number, parts in formats())


def test_what_files_hold_changes_on_purpose() -> None:
    recorded = FILE.read_text(encoding="utf-8")
    assert text() == recorded, (
        "raise the number of this kind of file if need be, and run python tests/test_formats.py"
    )


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
