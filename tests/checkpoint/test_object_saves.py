"""The save of several processes to an object store, with threads in their place and a dict for the store."""

import json
from typing import Any

from doubles import raising
from fellows import Fellows

from jstep.checkpoint import object_store
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.object_store import ObjectSave
from jstep.stores.objects import ABSENT, ReadResult

FOLDER = "model-3/data.1"


class Store(dict[str, bytes]):
    """Objects by key; writes of some keys fail."""

    failing: tuple[str, ...] = ()

    def at(self, key: str) -> str:
        return f"gs://bkt/{key}"

    def read(self, key: str) -> ReadResult:
        return ReadResult(self.get(key), b"stamp" if key in self else ABSENT)

    def write(self, key: str, data: bytes) -> None:
        if key in self.failing:
            raise OSError(f"no right to write {key}")
        self[key] = data


def saved(monkeypatch: Any, store: Any, commit: Any, blocks: Any = lambda i: ()) -> list[Any]:
    two = Fellows(monkeypatch)

    def run(index: int) -> Any:
        return ObjectSave(store, "model-3", FOLDER, blocks(index), commit).run()

    return two.each(run)


def test_the_first_process_commits_what_all_wrote(monkeypatch: Any) -> None:
    store, committed = Store({"model-3/manifest.json": b"older"}), []
    assert saved(monkeypatch, store, lambda *args: committed.append(args)) == [None, None]
    ((files, before),) = committed
    assert before == b"stamp"
    assert list(files) == ["part.0.json", "part.1.json"]
    assert [files[key]["bytes"] for key in files] == [len(store[f"{FOLDER}/{key}"]) for key in files]
    assert sorted(store) == [f"{FOLDER}/{name}" for name in ("outcome.json", "part.0.json", "part.1.json")] + [
        "model-3/manifest.json"
    ]
    assert json.loads(store[f"{FOLDER}/outcome.json"]) == {"failed": ""}


def test_an_error_of_one_process_is_an_error_of_both(monkeypatch: Any, caplog: Any) -> None:
    def blocks(index: int) -> Any:
        return map(raising(ValueError("x" * 400)), [1]) if index == 1 else ()

    first, second = saved(monkeypatch, Store(), raising(AssertionError), blocks)
    assert repr(second) == f"ValueError({'x' * 400!r})"
    assert (type(first), str(first)) == (CheckpointError, f"process 1: ValueError: {'x' * 288}")

    store = Store()
    first, second = saved(monkeypatch, store, raising(OSError("full")))
    assert repr(first) == "OSError('full')"
    assert (type(second), str(second)) == (CheckpointError, "on the first process: OSError: full")
    assert not caplog.records

    store.failing = (f"{FOLDER}/outcome.json",)
    del store[f"{FOLDER}/outcome.json"]
    monkeypatch.setattr(object_store, "_OUTCOME_TIMEOUT", -1.0)
    first, second = saved(monkeypatch, store, raising(OSError("full")))
    assert repr(first) == "OSError('full')"
    assert str(second) == f"gs://bkt/{FOLDER}/outcome.json: the first process has not reported the outcome"
    assert [record.getMessage() for record in caplog.records] == [
        f"the outcome of {FOLDER} could not be reported to the other processes: no right to write {FOLDER}/outcome.json"
    ]
