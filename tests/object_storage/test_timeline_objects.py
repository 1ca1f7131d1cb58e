"""The timeline of a run below a URL that does not respond: it delays the run once."""

from jstep.timeline import Timeline
from jstep.timeline.lines import TIMES


def test_a_store_that_refuses_is_tried_once(gcs, one_retry, caplog):
    gcs.fail = [("", "", 403, 10**6)]
    timeline = Timeline("gs://bkt/run", "model")
    timeline.write("start", step=0)
    tried = len(gcs.seen)
    assert tried
    for n in range(50):
        timeline.write(TIMES, step=n)
    timeline.write(TIMES, to_disk=True)
    timeline.close()
    assert len(gcs.seen) == tried
    assert [record.getMessage().count("cannot be kept") for record in caplog.records] == [1]


def test_the_first_lines_are_kept_until_it_responds(gcs, one_retry, monkeypatch):
    gcs.fail = [("", "", 403, 10**6)]
    timeline = Timeline("gs://bkt/run", "model")
    timeline.write("start")
    for n in range(5):
        timeline.write(TIMES, step=n)
    gcs.fail = []
    monkeypatch.setattr("jstep.timeline.timeline.time.monotonic", lambda: 1e12)
    timeline.write(TIMES, step=5)
    (key,) = gcs.keys("run/timeline")
    assert [line.split(b'"step": ')[-1] for line in gcs.data(key).splitlines()][1:] == [b"5}"]
