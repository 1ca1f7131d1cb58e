"""The files of the package, its tests and its pages. Each is read and parsed once, for all rules
about the source."""

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

import jstep

PACKAGE = Path(inspect.getfile(jstep)).parent
ROOT = PACKAGE.parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}
"""Name of each module, without `jstep.` → its file."""
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path):
    return ast.parse(text_of(path))


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


def import_file(path):
    """Return a file that is in no package as a new module, whose name is not that of another
    one."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(path):
    return str(path.relative_to(ROOT))
