"""Files that a user names: through FIFOs, along links, and with the mode of the file that is
replaced."""

import os
import pathlib
import stat
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jstep
from jstep import summary
from jstep.look.cli import main
from jstep.look.report import Report

optimizer = jstep.sgd(0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    where = tmp_path_factory.mktemp("run")
    train_step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2), optimizer)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    jstep.train(
        train_step, state, lambda step: (), 4, checkpoint_dir=where, logdir=where,
        save_checkpoint_steps=2, save_summaries_steps=1, log_steps=None,
    )  # fmt: skip
    return where


def write_graph(run: pathlib.Path, path: pathlib.Path) -> None:
    summary.write_graph(jax.jit(lambda x: x + 1).trace(jnp.ones(2)), path.parent, path.name)


WRITERS: dict[str, tuple[str, bytes, Callable[[pathlib.Path, pathlib.Path], Any]]] = {
    "report -o": (
        "page.html",
        b"<!doctype",
        lambda run, path: main(["report", str(run), "-o", str(path)]),
    ),
    "report(file)": ("page.html", b"<!doctype", lambda run, path: jstep.report(run, path)),
    "Report.save": ("page.html", b"<p>", lambda run, path: Report(html="<p>").save(path)),
    "save_weights": (
        "x.safetensors",
        b"",
        lambda run, path: jstep.save_weights(path, {"w": jnp.ones(2)}),
    ),
    "write_graph": ("x.mlir", b"module", write_graph),
}
QUICK = [name for name in WRITERS if name != "report(file)"]


@pytest.fixture(params=WRITERS)
def writer(request: Any, run: pathlib.Path, tmp_path: pathlib.Path) -> Any:
    """The file, a function that writes it, and one that checks what was written."""
    name, begins, write = WRITERS[request.param]

    def check(data: bytes) -> None:
        assert data.startswith(begins)
        assert begins or len(data) == 8 + int.from_bytes(data[:8], "little") + 8, (
            "two numbers in float32"
        )

    return tmp_path / name, lambda: write(run, tmp_path / name), check


@pytest.mark.thorough(except_for={"writer": QUICK})
def test_a_fifo_is_written_through(writer: Any) -> None:
    path, write, check = writer
    os.mkfifo(path)
    if path.suffix == ".safetensors":
        with pytest.raises(OSError, match="is not a regular file, and would be replaced"):
            write()
        return
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    write()
    reader.join(20)
    check(found[0])
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_an_open_pipe_is_written_through(tmp_path: pathlib.Path) -> None:
    """As `-o /dev/stdout | gzip` does: the path that its link names is none."""
    read, write = os.pipe()
    (tmp_path / "page.html").symlink_to(f"/dev/fd/{write}")
    Report(html="<p>").save(tmp_path / "page.html")
    assert os.read(read, 100) == b"<p>"
    os.close(read)
    os.close(write)


@pytest.mark.thorough(except_for={"writer": QUICK})
def test_a_link_is_followed_and_a_mode_stays(writer: Any, tmp_path: pathlib.Path) -> None:
    path, write, check = writer
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / path.name
    path.symlink_to(target)
    write()
    check(target.read_bytes())
    target.write_bytes(b"before")
    target.chmod(0o600)
    write()
    check(target.read_bytes())
    assert path.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    path.unlink()
    target.rename(path)
    write()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["disk", path.name])


def test_shards_replace_nothing_but_files(tmp_path: pathlib.Path) -> None:
    params = {"a": jnp.ones(64), "b": jnp.ones(64)}
    fifo = tmp_path / "x-00002-of-00002.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="is not a regular file, and would be replaced"):
        jstep.save_weights(tmp_path / "x.safetensors", params, max_shard_bytes=300)
    assert [path.name for path in tmp_path.iterdir()] == [fifo.name]
