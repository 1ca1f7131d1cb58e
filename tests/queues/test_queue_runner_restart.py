"""Restarting a `QueueRunner`, collections, and invalid arguments."""

import pytest
from runner_ops import check_no_leftover_threads, counting_op, join_all

from jstep.queues.coordinator import Coordinator
from jstep.queues.queue_runner import QueueRunner, add_queue_runner, start_queue_runners
from jstep.queues.queues import FIFOQueue

no_leftover_threads = pytest.fixture(autouse=True)(check_no_leftover_threads)


class TestRestart:
    def test_not_while_threads_are_running(self):
        queue = FIFOQueue(2)
        coord = Coordinator()
        runner = QueueRunner(queue, [counting_op(queue)])
        threads = runner.create_threads(coord, start=True)
        with pytest.raises(RuntimeError, match="have not ended; join them first"):
            runner.create_threads(coord)
        coord.request_stop()
        coord.join(threads)
        assert len(runner.create_threads(coord, start=True)) == 1
        coord.clear_stop()

    def test_restart_clears_the_recorded_exceptions(self):
        def broken():
            raise ValueError("broken")

        runner = QueueRunner(FIFOQueue(2), [broken])
        for _ in range(2):
            assert join_all(runner.create_threads(start=True))
            assert len(runner.exceptions_raised) == 1


class TestCollections:
    def test_start_queue_runners(self, request):
        name = request.node.name
        queues = [FIFOQueue(3), FIFOQueue(3)]
        for queue in queues:
            add_queue_runner(QueueRunner(queue, [counting_op(queue)] * 2), collection=name)
        coord = Coordinator()
        threads = start_queue_runners(coord, collection=name)
        assert len(threads) == 4
        assert all(t.daemon for t in threads)
        for queue in queues:
            queue.dequeue_many(5)
        coord.request_stop()
        coord.join(threads)
        assert all(queue.is_closed() for queue in queues)

    def test_running_are_skipped_and_closed_are_removed(self, request, caplog):
        name = request.node.name
        queue = FIFOQueue(3)
        runner = QueueRunner(queue, [counting_op(queue)])
        add_queue_runner(runner, name)
        add_queue_runner(runner, name)
        coord = Coordinator()
        threads = start_queue_runners(coord, collection=name)
        assert len(threads) == 1
        assert start_queue_runners(coord, collection=name) == []
        assert not caplog.records
        coord.request_stop()
        coord.join(threads)
        assert start_queue_runners(coord, collection=name) == []
        assert name in caplog.text
