"""The single-process examples run as a user runs them, each in its own process, shortened."""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from comparisons import same
from programs import ROOT, fingerprint, finished, run, start

import jstep


def events(directory):
    for path in sorted(directory.glob("events.out.tfevents.*")):
        yield from jstep.summary.summary_iterator(path)


def scalars(directory, tag):
    """Return the values of a tag by step."""
    return {
        e.step: v.simple_value for e in events(directory) for v in e.summary.value if v.tag == tag
    }


def is_bitwise_equal(a, b):
    """Return whether the newest checkpoints of two directories are bitwise identical."""
    return same(*(jstep.Saver(directory).restore(None) for directory in (a, b)))


@pytest.mark.thorough
def test_the_transformer_learns_and_resumes(tmp_path):
    code = (
        "import runpy, sys; names = runpy.run_path(sys.argv[1]); names['main'](20, 'run'); "
        "state = names['main'](40, 'run'); x = names['load']()[:64]; "
        "print(state.global_step, names['loss_fn'](state.params, x))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "examples" / "transformer.py"],
        cwd=tmp_path,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    step, loss = done.stdout.split()
    assert int(step) == 40
    assert float(loss) < 4.5  # 5.5 is that of 256 equally probable bytes
    assert "restored model-20" in done.stderr


DIGITS_STEPS = 120


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """An uninterrupted run: its directory and its output."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    directory = tmp_path_factory.mktemp("digits")
    done = finished("digits.py", "--steps", DIGITS_STEPS, "--dir", directory)
    assert done.returncode == 0, done.stderr
    assert "event files of others" not in done.stderr
    return directory, done.stdout


@pytest.mark.thorough
def test_digits_learns(digits):
    directory, out = digits
    found = re.search(
        r"best weights, after (\d+) updates: ([\d.]+) raw, ([\d.]+) averaged weights",
        out,
    )
    best, raw, averaged = int(found[1]), float(found[2]), float(found[3])
    assert raw >= 0.96
    assert averaged >= 0.96
    rates = scalars(directory, "learning_rate")
    # The first plateau of the staircase has 200 steps.
    assert list(rates.values()) == pytest.approx([2e-3] * len(rates))
    losses = scalars(directory, "validation/loss")
    assert list(losses) == [50, 100, DIGITS_STEPS]
    assert best == min(losses, key=losses.get)
    assert (
        f"of {DIGITS_STEPS} updates, the validation loss was best after {best}: {losses[best]:.4f}"
    ) in out
    with jstep.Saver(directory, prefix="best") as saver:
        assert saver.all_steps() == [best]


@pytest.mark.thorough
def test_digits_writes_summaries(digits):
    directory, out = digits
    kinds = {(v.tag, v.WhichOneof("value")) for e in events(directory) for v in e.summary.value}
    assert kinds >= {
        ("loss", "simple_value"),
        ("grad_norm", "simple_value"),
        ("global_step/sec", "simple_value"),
    }
    assert kinds >= {
        (f"params/{name}/kernel", "histo") for name in ("conv1", "conv2", "dense1", "dense2")
    }
    assert sum(bool(e.graph_def) for e in events(directory)) == 1
    wrong = int(re.search(r"(\d+) mistakes", out).group(1))
    assert wrong <= 0.04 * 450
    (picture,) = (
        v.image for e in events(directory) for v in e.summary.value if v.HasField("image")
    )
    assert (picture.height, picture.width) == (2 * 9 * 8, 8 * 9 * 8)


@pytest.mark.thorough
def test_digits_resumes_bitwise_after_ctrl_c(digits, tmp_path):
    uninterrupted, expected = digits
    args = ("--steps", DIGITS_STEPS, "--dir", tmp_path)
    process = start("digits.py", *args)
    try:
        for line in process.stderr:
            if line.startswith("step 50  validation/loss"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    stopped = int(
        re.search(r"SIGINT stopped the run after step (\d+), which is saved", err).group(1)
    )
    assert 50 <= stopped < DIGITS_STEPS
    assert "test accuracy" not in out

    again = run("digits.py", *args)
    assert f"model-{stopped}: resuming from it" in again
    # The lines before that of the page, with the fingerprint.
    assert again.splitlines()[-4:-1] == expected.splitlines()[-4:-1]
    assert is_bitwise_equal(uninterrupted, tmp_path)
    assert scalars(tmp_path, "loss") == scalars(uninterrupted, "loss")

    rerun = run("digits.py", *args)
    assert rerun.splitlines()[-4:-1] == expected.splitlines()[-4:-1]


@pytest.mark.thorough
def test_char_lm_losses_are_equal_on_one_device_and_a_mesh(tmp_path):
    pytest.importorskip("tensorboard")
    one, many = tmp_path / "one", tmp_path / "many"
    with ThreadPoolExecutor() as pool:  # such short runs mostly compile, on one core
        alone = pool.submit(run, "char_lm.py", "--steps", 20, "--dir", one)
        sharded = run("char_lm.py", "--steps", 10, "--dir", many, "--mesh", "data=4,model=2")
        out = alone.result()
    before, after = map(
        float, re.search(r"loss: ([\d.]+) nats a character before, ([\d.]+) after 20", out).groups()
    )
    assert before > 4.8  # a uniform guess among 128 characters gives 4.85
    assert after < 3.6
    assert len(re.findall(r"^def ", out, re.MULTILINE)) == 2  # the two samples

    assert "8 cpu devices {'data': 4, 'model': 2}: 0.92 MB of params on each" in sharded
    # The run saved on a 4 × 2 mesh resumes with FSDP, and then on one device.
    split = run("char_lm.py", "--steps", 15, "--dir", many, "--mesh", "data=8", "--fsdp")
    assert "8 cpu devices {'data': 8}: 0.25 MB of params on each" in split
    out = run("char_lm.py", "--steps", 20, "--dir", many)
    assert float(re.search(r"([\d.]+) after 20", out).group(1)) == pytest.approx(after, abs=5e-4)
    a, b = scalars(one, "loss"), scalars(many, "loss")
    assert list(a) == list(b) == [10, 20]
    assert list(b.values()) == pytest.approx(list(a.values()), rel=1e-4)


def test_char_lm_error_for_a_bad_mesh():
    done = finished("char_lm.py", "--mesh", "data=4,modle=2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "--mesh data=4,modle=2: must be axes data and model with their sizes, "
        "such as data=4,model=2\n"
    )


@pytest.mark.thorough
def test_char_lm_error_for_fsdp_without_a_data_axis():
    for mesh in ([], ["--mesh", "model=2"]):
        done = finished("char_lm.py", "--fsdp", *mesh)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(
            "--fsdp splits the parameters over the axis data: give a mesh that has it"
        )


@pytest.mark.thorough
def test_queues_reports_a_failing_reader():
    done = finished("queues.py", "--fail", "--steps", 1_000_000)
    assert done.returncode == 1
    assert "in read_file" in done.stderr
    assert re.search(r"ValueError: cannot decode \w+\.py", done.stderr)
    assert "done" not in done.stdout


@pytest.mark.thorough
def test_time_travel_finds_the_line_and_the_step(tmp_path):
    pytest.importorskip("sklearn")
    out = run("time_travel.py", "--directory", tmp_path)
    source = (ROOT / "examples" / "time_travel.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "images / length" in text)
    assert "the loss is nan at step 138 (the update 137 → 138)" in out
    assert f"the first non-finite number is produced by div at time_travel.py:{line} (scale)" in out
    assert "blank images in its rows [5]" in out
    assert "find_nonfinite of that step with that batch: None" in out
    assert "the runs diverge at step 64" in out
    assert "the runs diverge at step 80" in out
    assert "The update 60 → 61 is the first that differs" in out


SCORE_STEPS = 16


@pytest.mark.thorough
def test_a_run_killed_in_each_phase_gives_the_same_state(tmp_path):
    uninterrupted = run("score.py", "--steps", SCORE_STEPS)
    assert re.search(
        r"stages +0: short, 4: long\nbatch size +0: 8, 8: 16\nrows +code \d+ .* prose \d+ ",
        uninterrupted,
    )
    losses = [float(loss) for loss in re.findall(r"held-out \w+: ([\d.]+) nats", uninterrupted)]
    assert len(losses) == 2
    assert max(losses) < 4.7  # a uniform guess among 128 characters gives 4.85

    killed = ("score.py", "--steps", SCORE_STEPS, "--checkpoint-dir", tmp_path / "killed")
    resumed_from = []
    for step in (3, 7, 11, 15):  # checkpoints are at even steps
        done = finished(*killed, "--kill-at", step)
        assert done.returncode == -signal.SIGKILL, done.stderr
        resumed_from += re.findall(r"restored model-(\d+)", done.stderr)
    done = finished(*killed)
    assert done.returncode == 0, done.stderr
    resumed_from += re.findall(r"restored model-(\d+)", done.stderr)
    assert resumed_from == ["2", "6", "10", "14"]
    assert fingerprint(done.stdout) == fingerprint(uninterrupted)


@pytest.mark.thorough
def test_a_kill_needs_a_directory():
    done = finished("score.py", "--kill-at", 5)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "--kill-at needs --checkpoint-dir, to resume from\n"
