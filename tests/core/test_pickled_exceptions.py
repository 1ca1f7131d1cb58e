"""Exceptions of jstep in another process, or copied: nothing of them is lost."""

import copy
import pickle

import pytest

import jstep
import jstep.summary
from jstep.array_store.manifest import CorruptedCheckpointError, UnsupportedFormatError
from jstep.checkpoint.reading import GoneError
from jstep.slots.matching import NoGradientsError
from jstep.stores.files import ForeignFileError
from jstep.stores.objects import BusyError, LostError, StoreError
from jstep.stores.tagged_arrays import UnsupportedError

ERRORS = [
    NoGradientsError({"w": 1.0}, "why"),
    jstep.summary.DataLossError("file", 12, "checksum"),
    CorruptedCheckpointError(["a: wrong", "b: missing"]),
    UnsupportedFormatError("format 9"),
    jstep.CheckpointError("x"),
    jstep.Preempted("saved model-5", 138),
    jstep.DivergenceError("m", 3, ("w",)),
    jstep.NanLossDuringTrainingError("m", 4, may_save=True),
    jstep.OutOfRangeError("end"),
    jstep.CancelledError("c"),
    StoreError(28, "No space left on device", "gs://bucket/model-1"),
    BusyError("b"),
    LostError("t"),
    UnsupportedError("u", "['epoch']"),
    ForeignFileError("f"),
    GoneError("g"),
]


def everything(error: BaseException) -> tuple[object, ...]:
    known = {name: str(value) for name, value in vars(error).items()}
    return (
        type(error),
        str(error),
        known,
        getattr(error, "code", None),
        getattr(error, "filename", None),
    )


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy]
)
def test_nothing_of_an_exception_is_lost(error, again):
    error.__notes__ = ["jstep: step 3"]
    assert everything(again(error)) == everything(error)
    assert everything(again(again(error))) == everything(error)


def test_a_state_is_left_behind():
    error = jstep.Preempted("saved model-5", 138)
    error.state = {"w": 1.0}
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.code, back.state) == ("saved model-5", 138, None)
