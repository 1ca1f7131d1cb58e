"""The thread of `prefetch_to_device` ends however the loop ends."""

import gc
import signal
import threading
import time

import pytest
from prefetch_source import Source, check_no_leftover_threads, threads
from processes import run_program, running_program
from waiting import TIMEOUT, wait_until

from jstep.data.prefetch import prefetch_to_device

no_leftover_threads = pytest.fixture(autouse=True)(check_no_leftover_threads)


class TestThreadEnds:
    def test_when_the_source_is_exhausted(self):
        list(prefetch_to_device(range(3)))
        wait_until(lambda: not threads())

    def test_after_a_break(self):
        for _ in prefetch_to_device(Source(), size=2):
            break
        assert not threads()

    def test_when_the_iterator_is_unreferenced(self):
        items = prefetch_to_device(Source())
        next(items)
        del items
        assert not threads()

    def test_when_a_reference_cycle_is_collected(self):
        cycle = [prefetch_to_device(Source())]
        cycle.append(cycle)
        del cycle
        gc.collect()
        wait_until(lambda: not threads())

    def test_when_an_enclosing_generator_is_closed(self):
        def stream():
            for item in prefetch_to_device(Source()):
                yield item + 1

        def delegating():
            yield from prefetch_to_device(Source())

        for generator in (stream(), delegating()):
            next(generator)
            assert threads()
            generator.close()
            assert not threads()

    def test_on_close(self):
        items = prefetch_to_device(Source())
        next(items)
        items.close()
        assert not threads()
        with pytest.raises(StopIteration):
            next(items)
        items.close()

    def test_once_a_slow_source_returns(self):
        source = Source()
        items = prefetch_to_device(source)
        next(items)
        source.gate.clear()
        items.close()
        source.gate.set()
        wait_until(lambda: not threads())

    def test_close_wakes_a_waiting_consumer(self):
        source = Source()
        source.gate.clear()
        items = prefetch_to_device(source)
        ended = []
        consumer = threading.Thread(target=lambda: ended.append(list(items)), daemon=True)
        consumer.start()
        items.close()
        consumer.join(TIMEOUT)
        assert ended == [[]]
        source.gate.set()

    @pytest.mark.thorough
    def test_when_the_process_exits(self):
        program = """
            import itertools, time
            import jax
            from jstep.data.prefetch import prefetch_to_device
            full = [prefetch_to_device(one) for one in (itertools.count(), (jax.numpy.ones(4) for _ in iter(int, 1)))]
            asleep = prefetch_to_device(time.sleep(1000) for _ in [0])
            for items in full:
                next(items)
            raise SystemExit(5)
        """
        assert run_program(program) == (5, "", "")

    @pytest.mark.thorough
    def test_ctrl_c_interrupts_next(self):
        program = """
            import threading, time
            from jstep.data.prefetch import prefetch_to_device
            def slow():
                threading.Event().wait()
                yield
            try:
                items = prefetch_to_device(slow())
                print("ready", flush=True)
                next(items)
            except KeyboardInterrupt:
                print("interrupted")
        """
        with running_program(program) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)  # so that the signal most likely arrives during the wait
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60)[0].strip() == "interrupted"
