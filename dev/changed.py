"""The tests of what changed since a commit, for dev/changed.sh: `dev/changed.py [commit]`.

A changed file of a package leads to the tests of that package and of those that its changes reach;
a changed test to itself; a changed module of tests to the files that import it; data beside tests
to their folder; a page to the tests of the pages.
"""

import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]

# Folder of the package → folders of tests besides the one of the same name.
TESTED_BY = {
    "array_store": ["checkpoint", "object_storage"],
    "checkpoint": ["object_storage"],
    "compiling": ["loop"],
    "core": ["bad_input", "composition"],
    "data": ["bad_input", "loop"],
    "differentiate": ["bad_input", "optimizers", "training"],
    "evaluating": ["bad_input", "loop"],
    "hooks": ["bad_input"],
    "logs": ["bad_input", "hooks"],
    "loop": ["distributed", "hooks", "logs"],
    "metrics": ["evaluating"],
    "optimizers": ["bad_input", "composition", "sharding"],
    "origin": ["loop"],
    "queues": ["bad_input"],
    "record": ["look", "loop"],
    "schedules": ["bad_input"],
    "showing": ["logs", "look", "planning"],
    "slots": ["composition", "optimizers", "sharding"],
    "state": ["bad_input", "composition", "optimizers", "sharding"],
    "stores": ["object_storage"],
    "training": ["bad_input", "composition", "sharding"],
}
PAGES = {"docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"}


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints; exit with its message if it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed_files(commit: str) -> list[str]:
    """Return the files that differ from the point at which the current branch left a commit, new
    files included."""
    (base,) = git("merge-base", commit, "HEAD")
    return sorted(
        {
            *git("diff", "--name-only", "--no-renames", base),
            *git("ls-files", "-o", "--exclude-standard"),
        }
    )


@functools.cache
def imported_modules() -> dict[pathlib.Path, set[str]]:
    """Return the names of the modules that each file of tests imports."""
    pattern = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {path: set(pattern.findall(path.read_text(encoding="utf-8"))) for path in files}


def importers(module: str) -> set[str]:
    """Return the test files that import a module of tests, directly or through other modules of
    tests."""
    modules, found = [module], set()
    for name in modules:
        for path, names in imported_modules().items():
            if name in names and path.name.startswith(("test_", "conftest")):
                is_test = path.name != "conftest.py"
                found.add(str((path if is_test else path.parent).relative_to(ROOT)))
            elif name in names and path.stem not in modules:
                modules.append(path.stem)
    return found


def tests_of(file: str) -> set[str]:
    """Return the files and folders of tests that a change of a file may break."""
    parts = pathlib.PurePath(file).parts
    if parts[0] == "jstep" and len(parts) > 2:
        folders = [f"tests/{name}" for name in (parts[1], *TESTED_BY.get(parts[1], []))]
        return {file, *folders}  # the file itself has doctests
    if parts[0] == "tests" and file.endswith(".py"):
        name = parts[-1]
        if name == "conftest.py":
            return {"/".join(parts[:-1])}
        package = pathlib.PurePath(name).stem
        if len(parts) > 2 and parts[1].startswith("optimizer_"):
            package = parts[1]
        return {file} if name.startswith("test_") else importers(package)
    if parts[0] == "tests" and len(parts) > 2:
        also = {"tests/bad_input"} if parts[-1] == "refused_calls.txt" else set()
        return {f"tests/{parts[1]}"} | also  # data beside tests
    if parts[0] in ("dev", "benchmarks"):
        return {f"{parts[0]}/tests"}
    if parts[0] == "examples":
        return {"tests/examples"}
    if parts[0] in PAGES:
        return {"tests/docs"}
    return {"dev/tests/test_scripts.py", "tests/test_public_names.py"}


def tests_of_all(files: Iterable[str]) -> list[str]:
    """Return the existing files and folders of tests of several changed files, without those inside
    of others."""
    wanted = {path for file in files for path in tests_of(file) if (ROOT / path).exists()}
    return sorted(
        path for path in wanted if not wanted & {str(p) for p in pathlib.PurePath(path).parents}
    )


if __name__ == "__main__":
    print(*tests_of_all(changed_files(*(sys.argv[1:] or ["main"]))), sep="\n")
