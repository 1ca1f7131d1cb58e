"""The page "Will it fit?" and its script run and report the documented results."""

import contextlib
import pathlib
import re
import runpy
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "will_it_fit.py"
PAGE = ROOT / "docs" / "how" / "will-it-fit.md"


def rows_of(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with default_promotion():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert set(line) == {"|", "-"}
    names = [name.strip() for name in head.strip("|").split("|")]
    return [
        dict(zip(names, map(str.strip, row.strip("|").split("|")), strict=True)) for row in rows
    ]


@contextlib.contextmanager
def default_promotion():
    """JAX's default promotion settings instead of the stricter ones of the tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.tpu_compiler
def test_the_code_of_the_page_runs(capsys):
    (block,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with default_promotion():
        exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    assert out.startswith("a step on each of 16 devices, v5e:4x4 (compiled, not run")
    assert re.search(r"at its peak +\d+ MiB of 15.75 GiB$", out, re.MULTILINE), out


@pytest.mark.tpu_compiler
def test_the_script_reports_what_does_not_fit(capsys, monkeypatch):
    arguments = ("--model", "1b", "--topology", "v5e:4x4", "--layout", "replicated")
    (row,) = rows_of(capsys, monkeypatch, *arguments)
    assert row["devices"] == "16 × v5e:4x4"
    assert row["state"] == "10.50 GiB"
    assert re.fullmatch(r"1\d\.\d\d GiB of 15.75 GiB", row["peak memory"])
    assert row["fits"] == "**no**"


@pytest.mark.gpu_compiler
def test_the_script_supports_gpus(capsys, monkeypatch):
    found = rows_of(
        capsys,
        monkeypatch,
        "--model",
        "small",
        "--topology",
        "h100:8",
        "--layout",
        "fsdp",
        "--layout",
        "fsdp+host",
    )
    (row,) = found  # compile-only GPUs have no host memory
    assert (row["layout"], row["fits"]) == ("fsdp", "yes")
    assert row["peak memory"].endswith("of 59.33 GiB")
