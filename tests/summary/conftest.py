"""Fixtures: TensorBoard's reader of event files, and a TensorBoard server."""

import re
import subprocess
import sys
import time
import urllib.request

import jax
import jax.numpy as jnp
import pytest

from jstep import summary

STEPS = range(1, 21)


@pytest.fixture
def accumulate():
    """A function that reads all events of a run with TensorBoard's reader."""
    from tensorboard.backend.event_processing import event_accumulator

    def read(path):
        everything = event_accumulator.STORE_EVERYTHING_SIZE_GUIDANCE
        return event_accumulator.EventAccumulator(str(path), size_guidance=everything).Reload()

    return read


@pytest.fixture
def written(tmp_path, accumulate):
    """A function that writes a summary, and reads it with TensorBoard's reader."""

    def write(created, step=None, name="."):
        with summary.SummaryWriter(tmp_path / name) as writer:
            writer.add_summary(created, step)
        return accumulate(tmp_path / name)

    return write


@pytest.fixture(autouse=True)
def clear_collections():
    """Discard the eager summaries of earlier tests."""
    for key in ("summaries", "train", "eval"):
        summary.merge_all(key)


def train_step(state, batch):
    """A step whose graph has name scopes, a nested jit, a scan and a gradient."""

    def loss_fn(params):
        with jax.named_scope("dense"):
            h = jax.nn.relu(batch["x"] @ params["dense"]["kernel"] + params["dense"]["bias"])
        with jax.named_scope("rnn"):
            h, _ = jax.lax.scan(lambda c, x: (jnp.tanh(c + x), None), h, jnp.stack([h, h]))
        return jnp.mean((h.sum(axis=1) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "global_step": state["global_step"] + 1}, {"loss": loss}


def state_and_batch():
    params = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros((1, 4))}}
    state = {"params": params, "global_step": jnp.int32(0)}
    return state, {"x": jnp.ones((2, 3)), "y": jnp.zeros(2)}


@pytest.fixture(scope="session")
def logdir(tmp_path_factory):
    """A log directory with a run `demo` that contains scalars, a graph, text and
    hyperparameters."""
    path = tmp_path_factory.mktemp("logs")
    with summary.SummaryWriter(path / "demo") as writer:
        writer.add_graph(train_step, *state_and_batch())
        writer.add_summary(summary.text("notes", "rate **0.1**"))
        writer.add_hparams({"rate": 0.1, "optimizer": "adam"})
        for step in STEPS:
            writer.add_summary(summary.scalar("loss", 1.0 / step), step)
    return path


@pytest.fixture(scope="session")
def tensorboard_url(logdir, tmp_path_factory):
    """The URL of a TensorBoard server on loopback that has loaded the run."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    with open(log, "wb") as out:
        server = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=out, stderr=out)
    try:
        yield _address(server, log)
    finally:
        server.terminate()
        server.wait(timeout=20)


def _address(server, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        if match := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            with urllib.request.urlopen(f"{match.group()}/data/plugin/scalars/tags") as response:
                if b"loss" in response.read():
                    return match.group()
        time.sleep(0.2)
    raise RuntimeError(f"tensorboard did not start:\n{log.read_text()}")
