"""The plugin of the nightly run: which tests it selects, and which it lists as skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEV = Path(__file__).parents[1]

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skipif(True, reason="needs a")
def test_by_mark():
    pass

@pytest.mark.parametrize("x", ["a b::c[d]", "e"])
def test_by_import(x):
    pytest.importorskip("a_package_that_is_missing")

@pytest.fixture
def packages():
    pytest.skip("b is not\\n installed")

def test_by_fixture(packages):
    pass

@pytest.mark.xfail
def test_xfails():
    assert False

def test_of_a_part(record_property):
    record_property("left_out", "needs c")

@pytest.mark.thorough
def test_thorough():
    pass
"""
MODULE = "import pytest\n\npytest.importorskip('another', reason='needs d')\n\ndef test(): pass\n"


def run(directory: Path, *arguments: str, code: int = 0) -> str:
    """Run pytest with the plugin in a folder; return what it prints."""
    (directory / "one").mkdir(exist_ok=True)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n")
    (directory / "one/test_one.py").write_text(TESTS)
    (directory / "test_two.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist.plugin", "-p", "nightly_tests"]
    # Installed plugins, of which one imports JAX, take most of the time.
    variables = {"PYTHONPATH": str(DEV), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=directory,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_skipped_tests_are_written_with_their_reasons(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    run(tmp_path, *workers, "--write-skipped=skipped")
    missing = "could not import 'a_package_that_is_missing': "
    missing += "No module named 'a_package_that_is_missing'"
    assert (tmp_path / "skipped").read_text() == "".join(
        f"{line}\n"
        for line in (
            "b is not installed\tone/test_one.py::test_by_fixture",
            f"{missing}\tone/test_one.py::test_by_import[a b::c[d]]",
            f"{missing}\tone/test_one.py::test_by_import[e]",
            "needs a\tone/test_one.py::test_by_mark",
            "needs c\tone/test_one.py::test_of_a_part",
            "needs d\ttest_two.py",
        )
    )


def test_a_session_that_was_cut_writes_no_list(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text("def test_fails(): assert False\n")
    run(tmp_path, "--write-skipped=skipped", "-x", "test_fails.py", "one", code=1)
    assert not (tmp_path / "skipped").exists()
    run(tmp_path, "--write-skipped=skipped", "test_fails.py", "one", code=1)
    assert (tmp_path / "skipped").exists()


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_only_the_listed_tests_run_and_each_must_exist(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    ids = tmp_path / "ids"
    ids.write_text("one/test_one.py::test_passes\none/test_one.py::test_by_import[a b::c[d]]\n")
    assert "1 passed, 1 skipped" in run(tmp_path, *workers, "--only-ids=ids", "one")
    ids.write_text("one/test_one.py\n")
    assert "3 passed, 4 skipped, 1 xfailed" in run(tmp_path, *workers, "--only-ids=ids", "one")
    ids.write_text("one/test_one.py::test_passes\none/test_one.py::test_by_import[f]\n")
    printed = run(tmp_path, *workers, "--only-ids=ids", "one", code=3)
    assert (
        "no such tests here, or their modules are skipped: one/test_one.py::test_by_import[f]"
        in printed
    )


def test_the_quick_and_the_thorough_tests_of_a_folder_are_complements(tmp_path: Path) -> None:
    quick = run(tmp_path, "--quick-only=one", "test_two.py", "one")
    assert "2 passed, 5 skipped, 1 deselected, 1 xfailed" in quick
    thorough = run(tmp_path, "--thorough-only=one", "test_two.py", "one")
    assert "1 passed, 1 skipped, 7 deselected" in thorough
