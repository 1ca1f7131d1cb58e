"""What each optimizer declares about its slots: their roles and contents, by which they are
restored and sharded.

For a plain optimizer this follows from its entry in the table, see `follows`. The others are in
roles_of_table.json, with the shapes and dtypes of their slots; `python
tests/optimizers/test_roles_of_table.py` writes it anew.
"""

import dataclasses
import json
import pathlib
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from optimizer_table import TABLE

from jstep.slots.roles import roles_of as declared

FILE = pathlib.Path(__file__).with_name("roles_of_table.json")
USUAL = {"m": "mean", "momentum": "mean", "v": "square", "v_max": "square", "accumulator": "square"}
"""The contents of slots of these names."""


def roles_of(name):
    """Return the slots of an optimizer and each field of their roles, as texts without
    addresses."""
    optimizer = TABLE[name].make(0.1)
    params = {"w": jnp.ones((8, 4), jnp.bfloat16), "b": jnp.ones(4)}
    roles = declared(optimizer, params)
    slots = jax.eval_shape(optimizer.init, params)
    found = {"slots": str({path: (x.shape, str(x.dtype)) for path, x in _leaves(slots)})}
    for field in dataclasses.fields(roles):
        value = getattr(roles, field.name)
        if value:
            found[field.name] = _text(value)
    return found


def follows(entry):
    """Return the roles and contents of slots that follow from an entry: those of an optimizer such
    as Adam."""
    slots = {
        name: "Role.COPY" if initial == "copy" else "None"
        for name, initial in entry.initial.items()
    }
    scalars = {
        name: "Role.AGE" if name == "start_step" else "Role.SHARED" for name in entry.scalars
    }
    numbers = {name for name, initial in entry.initial.items() if isinstance(initial, float)}
    holds = {name: kind for name, kind in USUAL.items() if name in numbers}
    counted = set()
    if "start_step" in entry.scalars:
        counted = {("start_step", name, None) for name in (slots | scalars) if name != "start_step"}
    found = {
        "roles": _text(slots | scalars),
        "complete": "True",
        "holds": _text(holds),
        "counted": _text(counted),
    }
    return {field: text for field, text in found.items() if text != "{}"}


def is_plain(name, found):
    return {field: text for field, text in found.items() if field != "slots"} == follows(
        TABLE[name]
    )


def _leaves(slots):
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(slots)
    ]


def _text(value):
    """A text of a value that is the same in each process: functions by their names, sets sorted."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if hasattr(value, "items"):
        return (
            f"{{{', '.join(f'{_text(key)}: {_text(one)}' for key, one in sorted(value.items()))}}}"
        )
    if dataclasses.is_dataclass(value):
        parts = [
            f"{one.name}={_text(getattr(value, one.name))}" for one in dataclasses.fields(value)
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else str(value)


def test_the_roles_of_slots():
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    for name in TABLE:
        found = roles_of(name)
        advice = "run python tests/optimizers/test_roles_of_table.py, and review the difference"
        assert found == recorded[name] if name in recorded else is_plain(name, found), (
            f"{name}: {advice}"
        )
    assert recorded.keys() <= TABLE.keys()


if __name__ == "__main__":
    found = {name: roles for name in TABLE if not is_plain(name, roles := roles_of(name))}
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
