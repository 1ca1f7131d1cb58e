"""Helpers that read the events of a writer."""

from jstep import summary


def scalars(events, tag="loss"):
    return [(e.step, e.value) for e in events.Scalars(tag)]


def events_of(writer):
    return list(summary.summary_iterator(writer.path))
