"""The house: which module may import which, who compiles and donates, and what a bare import loads."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jstep

ROOT = Path(inspect.getfile(jstep)).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}

# Imports go down this list, or sideways within a row; sideways never in a circle.
STOREYS = [
    {"core"},
    {"sharding", "schedules", "clipping", "metrics"},
    {"state"},
    {"optimizers"},
    {"differentiate"},
    {"training"},
    {"distributed", "stores", "topologies"},
    {"fingerprints"},
    {"data", "queues", "checkpoint", "summary"},
    {"timeline", "weights"},
    {"hooks"},
    {"evaluating"},
    {"loop"},
    {"tools", "transfer"},
    {"cli", "__main__"},
]
HOUSE = set().union(*STOREYS)
HOST = STOREYS[8]
STEP = set().union(*STOREYS[:7])
"""What a training step is made of. The host side may compile helpers of its own; it never steps."""
PUBLIC_COMPILERS = {"training.step", "training.scan"}
COUNTERS = {"training.apply"}
BUILDERS = {"sharding.layout"}
"""A state too large for one device is made under jit, once; nothing there steps or donates."""
READERS = {"core.places"}
"""Reads arrays where they are, outside of steps: fingerprints, and checks of parameters. Donates nothing."""
STAGES = {"checkpoint.stage"}
"""Copies a state into memory that a Saver keeps for it: donates its own arrays, never a state."""
SUMS = {"hooks.metric_sums_program"}
"""Adds metrics up in an array of its own, which it donates; never a state."""
LOADED_WHEN_USED = {"checkpoint.store.orbax_arrays": {"orbax"}, "checkpoint.store.tensors": {"tensorstore"}}
"""Modules that a bare `import jstep` does not load, and what they may import at their top."""
SHARED_TRACES = {
    "core.meshes",  # a function that JAX may refuse leaves nothing in the caller's program
    "clipping.norms",
    "optimizers.leafwise",
    "optimizers.apply_updates",
    "optimizers.conditional_update",
    "optimizers.eigenbases",
    "optimizers.newton_schulz",
    "optimizers.wrappers.exponential_moving_average",
}
"""A leaf's rule is traced once for all leaves of a shape: a jit inside the step, which compiles nothing itself. So is a
norm, which users take outside of steps as well."""


def storey(module: str) -> int:
    top = module.split(".")[0]
    for number, names in enumerate(STOREYS):
        if top in names:
            return number
    raise AssertionError(f"jstep/{module.replace('.', '/')}.py has no place in the house: give it one in STOREYS")


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """All modules a module imports, wherever in it, as full names."""
    found = set()
    package = ["jstep", *module.split(".")]
    if MODULES[module].name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            for alias in node.names:
                inner = [*base[1:], alias.name]
                known = ".".join(inner) in MODULES or inner[0] in set().union(*STOREYS)
                is_module = base[0] == "jstep" and known and (len(base) == 1 or ".".join(inner) in MODULES)
                found.add(".".join([*base, alias.name] if is_module else base))
    return found


def inner_imports(module: str) -> set[str]:
    found = {name.removeprefix("jstep.") for name in imports(module) if name.split(".")[0] == "jstep"}
    assert "jstep" not in found, f"{module} imports the package itself, which imports everything"
    return found - {module}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    for other in inner_imports(module):
        assert storey(other) <= storey(module), f"{module} imports {other}, which lies above it"


def test_imports_go_in_no_circle() -> None:
    seen: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join((*path, module))}"
        if module not in seen:
            for other in inner_imports(module) & MODULES.keys():
                visit(other, (*path, module))
            seen[module] = True

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in HOST])
def test_host_modules_do_not_know_each_other_nor_the_step(module: str) -> None:
    own = module.split(".")[0]
    for other in inner_imports(module):
        top = other.split(".")[0]
        assert top == own or other.split(".")[0] not in HOST, f"{module} imports {other}"
        assert top != "training", f"{module} imports training: the host side takes a step, it does not make one"


def test_the_root_holds_packages_only() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not [path for path in ROOT.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    assert (ROOT / "py.typed").exists()


OF_ALL_PACKAGES = {"architecture", "docstrings", "golden", "optimizer_contract", "public_names", "averages", "scripts"}


def test_tests_lie_in_rooms() -> None:
    """Those of a package in the folder of its name; a file that comes back to the root is a merge that went wrong."""
    here = Path(__file__).parent
    assert {path.stem.removeprefix("test_") for path in here.glob("test_*.py")} <= OF_ALL_PACKAGES
    assert {"cli", "core", "data", "queues", "summary"} <= {path.name for path in here.iterdir() if path.is_dir()}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_underscore_module_crosses_a_wall(module: str) -> None:
    """What another package needs is public inside jstep, whether or not users see it."""
    for other in inner_imports(module):
        parts = other.split(".")
        private = any(part.startswith("_") and part != "__main__" for part in parts)
        assert parts[0] == module.split(".")[0] or not private, f"{module} imports {other}"


def test_no_export_shadows_a_module() -> None:
    for name in jstep.__all__:
        if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists():
            assert inspect.ismodule(getattr(jstep, name)), f"jstep.{name} hides the package of that name"


def test_what_is_exported_says_a_name_that_can_be_typed() -> None:
    for name in jstep.__all__:
        value = getattr(jstep, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == "jstep", f"jstep.{name}.__module__ is {value.__module__}"
            assert getattr(jstep, value.__qualname__) is value


def test_formulas_begin_with_a_word() -> None:
    """A rule that capitalises the first letter of a docstring would make M of Adam's m."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                assert not re.match(r"[A-Za-z]\w? ?(=|·|\+|−|-=|/|\*|≤|<)", first), f"{module}: {first}"


def test_the_package_only_reexports() -> None:
    """Names, which are loaded when they are asked for."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id in ("__all__", "__version__", "_EXPORTS") for t in node.targets
        )
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("_exports", "__getattr__", "__dir__")
        assert docstring or names or lazy, ast.unparse(node)


FORBIDDEN = {"optax", "flax", "tensorflow", "haiku", "equinox", "chex", "torch", "keras"}
LAZY = {"orbax", "tensorstore", "tensorboard", "matplotlib", "sklearn", "google", "safetensors"}


@pytest.mark.parametrize("module", MODULES)
def test_foreign_imports(module: str) -> None:
    for name in imports(module):
        top = name.split(".")[0]
        assert top not in FORBIDDEN, f"{module} imports {name}"
        assert not name.startswith(("jax._src", "jaxlib")), f"{module} imports {name}, which is private"
    for node in tree_of(module).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        lazy = LAZY - LOADED_WHEN_USED.get(module, set())
        assert not lazy & {n.split(".")[0] for n in names}, f"{module} imports {names} when jstep is imported"


def compiles(tree: ast.AST) -> list[str]:
    """Names by which a module could compile."""
    found = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"jit", "pjit", "pmap"}
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            found += [alias.name for alias in node.names if alias.name in {"jit", "pjit", "pmap"}]
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in STEP])
def test_only_training_compiles(module: str) -> None:
    found = compiles(tree_of(module))
    assert module in PUBLIC_COMPILERS | BUILDERS | READERS | SHARED_TRACES or not found, f"{module} compiles: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_only_training_donates_and_increments(module: str) -> None:
    if module in PUBLIC_COMPILERS | COUNTERS | STAGES | SUMS:
        return
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.keyword):
            assert not (node.arg or "").startswith("donate_arg"), f"{module} donates"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            assert called != "increment_global_step", f"{module} increments the step"


def test_training_does_both() -> None:
    """The rules above would also hold of a house where nobody compiles."""
    text = "".join(MODULES[name].read_text(encoding="utf-8") for name in PUBLIC_COMPILERS | COUNTERS)
    assert "jax.jit(" in text
    assert "donate_argnums" in text
    assert "global_step + 1" in text


def test_a_bare_import_loads_nothing_heavy() -> None:
    code = "import sys, jstep; {}; print(*{{name.split('.')[0] for name in sys.modules}})"
    every = "[getattr(jstep, name) for name in jstep.__all__]"
    bare, done = (
        subprocess.run(
            [sys.executable, "-c", code.format(use)], capture_output=True, text=True, check=True, timeout=300
        )
        for use in ("jstep.__all__", every)
    )
    assert "jax" not in bare.stdout.split(), "a name is loaded when it is asked for"
    heavy = {
        "orbax",
        "tensorboard",
        "tensorboardX",
        "matplotlib",
        "tensorflow",
        "sklearn",
        "tensorstore",
        "pandas",
        "safetensors",
    }
    assert not set(done.stdout.split()) & (heavy | FORBIDDEN)


# The tests themselves.

TESTS = sorted((ROOT.parent / "tests").rglob("*.py"))


@pytest.mark.parametrize(
    "path",
    [*MODULES.values(), *TESTS],
    ids=lambda path: str(path.relative_to(ROOT.parent)),
)
def test_a_file_holds_one_idea(path: Path) -> None:
    """A file that outgrows 300 lines is asking to be two."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages among the tests, pytest knows a file by its base name alone."""
    names = [path.name for path in TESTS if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
