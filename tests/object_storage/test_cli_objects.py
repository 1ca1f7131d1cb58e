"""The command line accepts URLs."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.stores import objects
from jstep.tools.cli import main

optimizer = jstep.momentum(0.1, 0.9)
train_step = jstep.minimize(lambda params, x: jnp.mean((params["w"][None] - x) ** 2), optimizer)
data = np.arange(24, dtype=np.float32).reshape(8, 3)


def run(url, seed=0):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    locations = {"checkpoint_dir": url, "logdir": f"{url}/logs", "save_checkpoint_steps": 5, "progress": False}
    hooks = [jstep.FingerprintHook(every_n_steps=1)]
    batches = jstep.batches(data, 2, seed=seed)
    jstep.train(train_step, state, batches, 10, hooks=hooks, save_summaries_steps=2, **locations)


@pytest.fixture
def runs(store, monkeypatch):
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    store.page = 1000
    other = store.run + "-other"
    run(store.run)
    run(other, seed=1)
    return store, store.run, other


def test_inspect(runs, capsys):
    store, url, _ = runs
    assert main(["inspect", f"{url}/model-10", "--json", "--verify"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["step"] == 10
    assert main(["inspect", url + "/"]) == 0
    out = capsys.readouterr().out
    assert "model-5" in out
    assert "model-10" in out
    (key,) = [key for key in store.keys("run/model-10/") if "pack" in key]
    generation, packed = store.objects["bkt"][key]
    store.objects["bkt"][key] = generation, packed[:-1] + bytes([packed[-1] ^ 1])
    assert main(["inspect", f"{url}/model-10", "--verify"]) == 2
    assert "pack.0.0" in "".join(capsys.readouterr())
    assert main(["inspect", f"{url}/model-11"]) == 2
    assert main(["inspect", url.replace("bkt", "nope")]) == 2
    assert main(["inspect", "az://bkt/run"]) == 2


def test_diff(runs, capsys):
    _, url, other = runs
    assert main(["diff", f"{url}/model-10", f"{url}/model-10"]) == 0
    assert main(["diff", f"{url}/model-10", f"{other}/model-10"]) == 1
    assert "params/w" in capsys.readouterr().out
    assert main(["diff", url, other]) == 1
    assert "5" in capsys.readouterr().out
    logs = [f"{place}/logs/fingerprints.jsonl" for place in (url, other)]
    assert main(["diff", *logs]) == 1
    assert main(["diff", logs[0], logs[0]]) == 0


def test_events_and_plot(runs, capsys, tmp_path):
    _, url, other = runs
    assert main(["events", f"{url}/logs"]) == 0
    assert "loss = " in capsys.readouterr().out
    picture = tmp_path / "loss.svg"
    assert main(["plot", f"{url}/logs", f"{other}/logs", "-o", str(picture)]) == 0
    svg = picture.read_text()
    assert {"loss", "global step"} <= set(re.findall("<!-- (.*?) -->", svg))
    assert svg.count("stroke: #1f77b4") >= 2  # a curve, and its line in the legend
    assert svg.count("stroke: #ff7f0e") >= 2


def test_an_expired_token_is_an_error(runs, capsys):
    store, url, _ = runs
    for command in (["inspect", url], ["inspect", f"{url}/model-10"], ["diff", url, url], ["events", f"{url}/logs"]):
        store.fail = [("", "", 401, 10**6)]
        assert main(command) == 2
        assert "credentials" in capsys.readouterr().err
