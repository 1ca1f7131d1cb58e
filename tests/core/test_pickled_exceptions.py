"""Exceptions of jstep in another process, or copied: nothing of them is lost."""

import copy
import inspect
import pickle
import pkgutil
import sys

import jax.numpy as jnp
import pytest

import jstep
import jstep.summary
from jstep.checkpoint.manifest import CorruptedError, UnsupportedFormatError
from jstep.checkpoint.reading import GoneError
from jstep.core.exceptions import Picklable
from jstep.slots.matching import NoGradientsError
from jstep.stores.files import ForeignFileError
from jstep.stores.objects import BusyError, StoreError, TruncatedError
from jstep.stores.tagged_arrays import UnsupportedError

ERRORS = [
    NoGradientsError({"w": 1.0}, "why"),
    jstep.summary.DataLossError("file", 12, "checksum"),
    CorruptedError(["a: wrong", "b: missing"]),
    UnsupportedFormatError("format 9"),
    jstep.CheckpointError("x"),
    jstep.Preempted("saved model-5", 138),
    jstep.DivergenceError("m", 3, ("w",)),
    jstep.AuditError("m", 3, None),
    jstep.NanLossDuringTrainingError("m", 4, may_save=True),
    jstep.OutOfRangeError("end"),
    jstep.CancelledError("c"),
    StoreError(28, "No space left on device", "gs://bucket/model-1"),
    BusyError("b"),
    TruncatedError("t"),
    UnsupportedError("u", "['epoch']"),
    ForeignFileError("f"),
    GoneError("g"),
]
PASSED_ON = {"StopWaiting", "EvaluationAbandoned"}
"""Those that never leave jstep."""


def everything(error: BaseException) -> tuple[object, ...]:
    known = {name: str(value) for name, value in vars(error).items()}
    return type(error), str(error), error.args, known, getattr(error, "code", None), getattr(error, "filename", None)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_nothing_of_an_exception_is_lost(error, again):
    error.__notes__ = ["jstep: step 3"]
    assert everything(again(error)) == everything(error)
    assert everything(again(again(error))) == everything(error)


def test_every_exception_is_picklable():
    for module in pkgutil.walk_packages(jstep.__path__, "jstep."):
        __import__(module.name)
    classes = {
        cls
        for name, module in sys.modules.items()
        if name.startswith("jstep.")
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, BaseException) and cls.__module__.split(".")[0] == "jstep"
    }
    assert {cls.__name__ for cls in classes if not issubclass(cls, Picklable)} == PASSED_ON
    assert {type(error) for error in ERRORS} < classes


def test_a_class_of_the_users_keeps_its_own_constructor():
    error = pickle.loads(pickle.dumps(_OwnError("a", number=3)))
    assert (type(error), str(error), error.number) == (_OwnError, "own: a", 3)


class _OwnError(jstep.CheckpointError):
    def __init__(self, what: str, *, number: int) -> None:
        super().__init__(f"own: {what}")
        self.number = number


def test_a_state_is_left_behind():
    error = jstep.CheckpointError("x")
    error.state = {"w": jnp.ones(2)}
    error.kept = {"w": jnp.ones(2)}
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.state, back.kept["w"].tolist()) == ("x", None, [1.0, 1.0])
    assert copy.copy(error).state is error.state
