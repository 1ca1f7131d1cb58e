"""Event files as a TensorBoard server returns them over HTTP."""

import io
import json
import urllib.parse
import urllib.request

import numpy as np
import pytest
from google.protobuf import text_format
from PIL import Image
from tensorboard.compat.proto import graph_pb2


@pytest.fixture(scope="module")
def get(tensorboard_url):
    def get(route, **query):
        address = f"{tensorboard_url}/data/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as response:
            return response.read()

    return get


def test_the_run_is_listed(get):
    assert json.loads(get("runs")) == ["demo"]


def test_scalars(get):
    points = json.loads(get("plugin/scalars/scalars", run="demo", tag="loss"))
    assert [step for _, step, _ in points] == list(range(1, 21))
    np.testing.assert_allclose([value * step for _, step, value in points], 1, rtol=1e-6)


def test_images(get):
    assert list(json.loads(get("plugin/images/tags"))["demo"]) == ["picture/image"]
    entries = json.loads(get("plugin/images/images", run="demo", tag="picture/image"))
    assert [entry["step"] for entry in entries] == [5, 10, 15, 20]
    data = get("plugin/images/individualImage", **dict(urllib.parse.parse_qsl(entries[-1]["query"])))
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert pixels.shape == (8, 8, 3)
    assert (pixels[0, 0].tolist(), pixels[7, 7].tolist()) == ([200, 0, 0], [0, 0, 100])


def test_histograms(get):
    entries = json.loads(get("plugin/histograms/histograms", run="demo", tag="weights"))
    assert [step for _, step, _ in entries] == [5, 10, 15, 20]
    for _, step, buckets in entries:
        lefts, rights, counts = np.array(buckets).T
        assert counts.sum() == 500
        assert (lefts <= rights).all()
        np.testing.assert_array_equal(lefts[1:], rights[:-1])
        assert -step / 10 * 5 < lefts[0] < 0 < rights[-1] < step / 10 * 5


def test_the_graph(get):
    assert json.loads(get("plugin/graphs/info"))["demo"]["run_graph"]
    graph = text_format.Parse(get("plugin/graphs/graph", run="demo"), graph_pb2.GraphDef())
    names = {node.name for node in graph.node}
    assert {"state/params/dense/kernel", "dense/dot_general", "rnn/scan/tanh", "result/1/loss"} <= names


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
