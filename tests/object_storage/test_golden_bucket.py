"""The golden run in a bucket, whose objects are files of `tests/golden`."""

import json
import pathlib

import pytest
from golden_runs import RUNS

import jstep

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_a_run_in_a_bucket_is_continued(version, gcs):
    gcs.page = 1000
    run = GOLDEN / version / "bucket"
    for path in run.rglob("*"):
        if path.is_file():
            gcs.put("bkt", f"run/{path.relative_to(run).as_posix()}", path.read_bytes())
    with jstep.Saver("gs://bkt/run") as saver:
        assert saver.all_steps() == [6]
    state = RUNS["bucket"]("gs://bkt/run", 8)
    assert jstep.global_step(state) == 8
    lines = [json.loads(line)["step"] for line in gcs.data("run/fingerprints.jsonl").splitlines()]
    assert lines == [2, 4, 6, 8]
