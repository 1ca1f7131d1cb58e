"""The timeline of a run below a URL that does not respond: it does not delay the run."""

from jstep.stores.timeline import TIMES, Timeline


def test_a_store_that_refuses_is_reported_once(gcs, one_retry, caplog):
    gcs.fail = [("", "", 403, 10**6)]
    timeline = Timeline("gs://bkt/run", "model")
    timeline.write("start", step=0)
    for n in range(50):
        timeline.write(TIMES, step=n)
    timeline.flush()
    tried = len(gcs.seen)
    assert tried
    for n in range(50):
        timeline.write(TIMES, step=n)
    assert len(gcs.seen) == tried, "the next upload is due in ten seconds"
    timeline.close()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.count("the data is kept") for message in messages] == [1, 0]
    assert "the last times of this run are lost" in messages[-1]
