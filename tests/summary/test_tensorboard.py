"""Event files as a TensorBoard server returns them over HTTP."""

import json
import urllib.parse
import urllib.request

import numpy as np
import pytest
from google.protobuf import text_format
from tensorboard.compat.proto import graph_pb2

pytestmark = pytest.mark.thorough  # they start a server


@pytest.fixture(scope="module")
def get(tensorboard_url):
    def get(route, **query):
        address = f"{tensorboard_url}/data/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as response:
            return response.read()

    return get


def test_scalars(get):
    points = json.loads(get("plugin/scalars/scalars", run="demo", tag="loss"))
    assert [step for _, step, _ in points] == list(range(1, 21))
    np.testing.assert_allclose([value * step for _, step, value in points], 1, rtol=1e-6)


def test_the_graph(get):
    assert json.loads(get("plugin/graphs/info"))["demo"]["run_graph"]
    graph = text_format.Parse(get("plugin/graphs/graph", run="demo"), graph_pb2.GraphDef())
    names = {node.name for node in graph.node}
    assert {"0/params/dense/kernel", "dense/dot_general", "rnn/scan", "result/1/loss"} <= names


def test_text_and_hparams(get, tensorboard_url):
    (entry,) = json.loads(get("plugin/text/text", run="demo", tag="notes"))
    assert "<strong>0.1</strong>" in entry["text"]
    request = urllib.request.Request(
        f"{tensorboard_url}/data/plugin/hparams/experiment",
        data=b"{}",
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        experiment = json.load(response)
    assert {info["name"] for info in experiment["hparamInfos"]} == {"rate", "optimizer"}
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == ["loss"]
