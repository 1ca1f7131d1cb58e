"""Graphs for TensorBoard, and `write_graph`."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from doubles import raising
from tensorboard.compat.proto import graph_pb2

from jstep import summary
from jstep.summary.graph import graph_def


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.jit
def block(x, w):
    with jax.named_scope("inner"):
        return jnp.tanh(x @ w)


def loss_fn(params, batch):
    with jax.named_scope("dense"):
        h = jax.nn.relu(batch["x"] @ params["dense"]["kernel"])
    with jax.named_scope("blocks"):
        h = block(h, params["square"])
        h = block(h, params["square"])
    h, _ = jax.lax.scan(lambda c, x: (jnp.sin(c) + x, c.sum()), h, jnp.stack([h, h]))
    h = jax.lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h, h)
    h = jax.lax.while_loop(lambda h: h.sum() < 3, lambda h: h + 1, jax.lax.stop_gradient(h)) + h
    h = jax.checkpoint(lambda h: jnp.exp(clipped(h)))(h)
    return jnp.sort(h.sum(axis=1))[0]


@jax.jit
def train_step(state, batch, *, rate=0.1):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
    return {"params": params}, {"loss": loss, "constant": 3.0}


STATE = {"params": {"dense": {"kernel": jnp.ones((3, 4))}, "square": jnp.ones((4, 4))}}
BATCH = {"x": jnp.ones((2, 3))}


def nodes(graph):
    """Check that TensorBoard accepts the graph, and return its nodes by name."""
    by_name = {node.name: node for node in graph.node}
    assert len(by_name) == len(graph.node)  # names are unique
    for node in graph.node:
        # Inputs refer to nodes.
        assert {name.partition(":")[0] for name in node.input} <= by_name.keys(), node
        assert re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.\-/]*", node.name)
    assert graph_pb2.GraphDef.FromString(graph.SerializeToString()) == graph
    return by_name


def test_a_node_for_each_argument_equation_and_result():
    traced = train_step.trace(STATE, BATCH, rate=0.5)
    by_name = nodes(graph_def(traced))
    parameters = {name for name, node in by_name.items() if node.op == "Parameter"}
    assert parameters == {"0/params/dense/kernel", "0/params/square", "1/x", "rate"}
    results = {name for name, node in by_name.items() if node.op == "Result"}
    paths = ("0/params/dense/kernel", "0/params/square", "1/loss", "1/constant")
    assert results == {f"result/{path}" for path in paths}
    operations = [node.op for node in by_name.values() if node.op not in ("Parameter", "Result")]
    assert operations == [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    assert by_name["result/1/constant"].input == []
    assert nodes(graph_def(train_step, STATE, BATCH, rate=0.5)).keys() == by_name.keys()


def test_names_of_scopes_calls_and_gradients():
    by_name = nodes(graph_def(train_step, STATE, BATCH))
    for name in (
        "dense/dot_general",
        "blocks/block_1",
        "cond",
        "while",
        "scan",
        "gradients/dense/dot_general",
    ):
        assert name in by_name, sorted(by_name)
    assert by_name["dense/dot_general"].input == ["1/x", "0/params/dense/kernel"]
    assert by_name["blocks/block_1"].input == ["blocks/block", "0/params/square"]
    assert by_name["blocks/block_1"].op == by_name["blocks/block"].op


def test_nodes_of_a_lowered_function():
    by_name = nodes(graph_def(train_step.lower(STATE, BATCH, rate=0.5)))
    assert [node.op for node in by_name.values()].count("Parameter") == 4
    assert by_name["dot_general"].op == "stablehlo.dot_general"
    assert set(by_name["dot_general"].input) <= {"arg", "arg_1", "arg_2", "arg_3"}
    assert by_name["block_1"].input[0] == "block"
    assert len(by_name["return"].input) == 4


def test_write_graph_as_text_is_stablehlo(tmp_path):
    traced = train_step.trace(STATE, BATCH)
    path = summary.write_graph(traced, tmp_path / "new", "step.mlir")
    assert path == str(tmp_path / "new" / "step.mlir")
    text = (tmp_path / "new" / "step.mlir").read_text()
    assert "stablehlo.dot_general" in text
    assert text == traced.lower().as_text()
    summary.write_graph(train_step.lower(STATE, BATCH), tmp_path, "lowered.mlir")
    assert (tmp_path / "lowered.mlir").read_text() == text
    summary.write_graph(lambda: train_step(STATE, BATCH), tmp_path, "function.mlir")
    assert "stablehlo.dot_general" in (tmp_path / "function.mlir").read_text()


def test_write_graph_as_binary_is_a_graph_def(tmp_path):
    path = summary.write_graph(train_step.trace(STATE, BATCH), tmp_path, "graph.pb", as_text=False)
    with open(path, "rb") as file:
        graph = graph_pb2.GraphDef.FromString(file.read())
    assert "dense/dot_general" in nodes(graph)


def test_write_graph_is_atomic(tmp_path, monkeypatch):
    path = summary.write_graph(lambda: jnp.ones(3), tmp_path, "graph.mlir")
    before = Path(path).read_text()

    monkeypatch.setattr(os, "replace", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        summary.write_graph(lambda: jnp.zeros(4), tmp_path, "graph.mlir")
    assert os.listdir(tmp_path) == ["graph.mlir"]
    assert Path(path).read_text() == before
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
