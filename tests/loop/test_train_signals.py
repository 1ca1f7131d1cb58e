"""`train` and signals, in processes: the state is saved, and the program exits."""

import signal
import textwrap

import pytest
from children import end, signalled, start


def test_a_signal_while_the_first_batch_is_computed(tmp_path):
    """A thread that is abandoned inside of XLA aborts the process, whose exit code then is 134."""
    script = """
def batch(step):
    os.kill(os.getpid(), signal.SIGTERM)
    x = jnp.ones((400, 400)) + jnp.eye(400)
    for _ in range(4):
        x = jnp.eye(400) * jnp.linalg.svd(x)[1][None]
    return {"x": jnp.ones((8, 8))}

train(4, batch, checkpoint_dir=directory)
"""
    end(start(script, tmp_path), 143)


@pytest.mark.thorough
def test_a_signal_that_does_not_interrupt_the_wait_is_handled(tmp_path):
    # Like a signal that arrives just before the wait; here, another thread receives it.
    script = """
import threading
def is_waiting():
    return sys._current_frames()[threading.main_thread().ident].f_code.co_name == "wait"
class Rows:
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if threading.current_thread().name == "jstep-first-batch":
            seen = 0
            while seen < 20:  # consecutive, to ignore earlier short waits
                time.sleep(0.01)
                seen = seen + 1 if is_waiting() else 0
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(1000)
train(100, jstep.batches(Rows(), 8), checkpoint_dir=directory)
"""
    end(start(script, tmp_path), 143)


@pytest.mark.thorough
def test_a_save_in_progress_ends_after_a_second_sigint(tmp_path):
    script = """
class Interrupts(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
import threading
left = threading.Event()
saver = jstep.Saver(directory)
with saver.flushing(lambda: left.wait(60)):  # the disk is slow
    try:
        train(10, hooks=[Interrupts()], checkpoint_dir=saver, save_checkpoint_steps=2)
    except KeyboardInterrupt as error:
        say("left", error)
    left.set()
    saver.wait()
say(saver.all_steps())
"""
    out, _ = end(start(script, tmp_path))
    assert "the run ended immediately, at step 3" in out
    assert out.endswith("[2]\n")


@pytest.mark.thorough
@pytest.mark.parametrize("progress", ["True", "False", "None"])
def test_a_process_says_that_it_waits_for_a_compilation(progress, tmp_path):
    script = f"""
    compile_it = jax.stages.Lowered.compile
    def slowly(self, *args, **kwargs):
        say("compiling")
        time.sleep(3.0)
        return compile_it(self, *args, **kwargs)
    jax.stages.Lowered.compile = slowly
    train(10, progress={progress})
    """
    process = signalled(textwrap.dedent(script), tmp_path, "compiling", signal.SIGINT)
    _, err = end(process, -signal.SIGINT if process.wait(60) < 0 else 1)
    assert sum("cannot be stopped" in line for line in err.splitlines()) == 1
