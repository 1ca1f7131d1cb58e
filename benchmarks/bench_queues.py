"""FIFOQueue fed by a QueueRunner, compared with `queue.Queue` fed by as many threads that call the
same ops.

python benchmarks/bench_queues.py
"""

import queue
import sys
import threading

from _timing import interleaved, report

import jstep


def enqueue_ops(put, producers, items):
    def op(numbers):
        return lambda: put(next(numbers))

    return [op(iter(range(items))) for _ in range(producers)]


def standard(producers, capacity):
    def run(items):
        q = queue.Queue(capacity)
        stop = threading.Event()

        def feed(op):
            try:
                while not stop.is_set():
                    op()
            except StopIteration:
                pass

        each = items // producers
        threads = [
            threading.Thread(target=feed, args=(op,)) for op in enqueue_ops(q.put, producers, each)
        ]
        for thread in threads:
            thread.start()
        for _ in range(each * producers):
            q.get()
        for thread in threads:
            thread.join()

    return run


def ours(producers, capacity):
    def run(items):
        q = jstep.FIFOQueue(capacity)
        coord = jstep.Coordinator()
        each = items // producers
        threads = jstep.QueueRunner(q, enqueue_ops(q.enqueue, producers, each)).create_threads(
            coord, start=True
        )
        for _ in range(each * producers):
            q.dequeue()
        coord.join(threads)

    return run


def main():
    good = True
    for producers in (1, 4, 8):
        for capacity in (10, 100, 1000):
            times = interleaved(
                {
                    "queue.Queue": standard(producers, capacity),
                    "FIFOQueue": ours(producers, capacity),
                },
                40_000,
            )
            title = f"Time per item, {producers} producers, capacity {capacity}"
            good &= report(title, times, {("FIFOQueue", "queue.Queue"): 1.1})
    return good


if __name__ == "__main__":
    sys.exit(not main())
