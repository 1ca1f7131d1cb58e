"""What refused calls are told, one of each kind: `tests/ROOM/refused_calls.txt`, as a session of
Python shows it.

A statement has no message: it prepares the calls of its file. The names that a file may use without
preparing them are those of `bad_input.py`, and `folder`, the path of an empty directory.
"""

import functools
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import bad_input
import jax
import jax.numpy as jnp
import pytest
from bad_input import PARAMS, adam, create, linear

import jstep

FILES = sorted(pathlib.Path(__file__).parents[1].glob("*/refused_calls.txt"))
CALL = re.compile(r"^>>> (.+)\n((?:(?!>>> |# ).+\n)*)", re.MULTILINE)
VARYING = re.compile(r" at 0x[0-9a-f]+|\bJit(?=Tracer\()")
"""What differs from one run or version of JAX to the next."""


class Refused(NamedTuple):
    """A call that is refused and what it is told: the name of the error and its text."""

    call: str
    told: str


def is_call(line: str) -> bool:
    """Return whether a line is a call, not a statement that prepares calls."""
    try:
        compile(line, "line", "eval")
    except SyntaxError:
        return False
    return True


def calls_of(path: pathlib.Path) -> list[Refused]:
    """Return the calls of a file."""
    return [
        Refused(*found)
        for found in CALL.findall(path.read_text(encoding="utf-8"))
        if is_call(found[0])
    ]


def names_of(path: pathlib.Path, folder: str) -> dict[str, Any]:
    """Return the names that the calls of a file use, with `folder`, which is empty at first."""
    names = vars(bad_input) | {"folder": folder}
    for line, _ in CALL.findall(path.read_text(encoding="utf-8")):
        if not is_call(line):
            exec(line, names)
    return names


def told(call: str, names: dict[str, Any]) -> str:
    """Return the error that a call raises as a file shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            result = eval(call, dict(names))
        except NameError:
            raise  # the call itself is wrong
        except Exception as error:
            return VARYING.sub("", f"{type(error).__name__}: {error}\n").replace(
                names["folder"], "FOLDER"
            )
    raise AssertionError(f"{call} is not refused: it returned {result!r}")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pathlib.Path], dict[str, Any]]:
    """A function from a file to the names that its calls use."""
    return functools.cache(lambda path: names_of(path, str(tmp_path_factory.mktemp("folder"))))


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        pytest.param(path, one, id=f"{path.parent.name}-{one.call}")
        for path in FILES
        for one in calls_of(path)
    ],
)
def test_what_a_refused_call_is_told(prepared: Any, path: pathlib.Path, refused: Refused) -> None:
    assert told(refused.call, prepared(path)) == refused.told


def test_an_error_leaves_the_state_usable() -> None:
    """The error is raised before compiling, so nothing is donated."""
    state = create(PARAMS, adam)
    good, bad = jstep.minimize(linear, adam), jstep.minimize(linear, adam, var_list=["nothing"])
    for wrong in (lambda: bad(state, jnp.ones((6, 2))), lambda: good(state, jnp.ones((6, 5)))):
        with pytest.raises((ValueError, TypeError)):
            wrong()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, _ = good(state, jnp.ones((6, 2)))
    assert jstep.global_step(state) == 1
