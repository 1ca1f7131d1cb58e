"""Architecture: allowed imports between modules, modules that may compile or donate, and lazy loading."""

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

# A module may import from its own layer and from the layers before it; cycles are not allowed.
LAYERS = [
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
HOST = LAYERS[8]
STEP = set().union(*LAYERS[:7])
"""The packages of a training step. Host packages may compile helpers, but they do not define steps."""
PUBLIC_COMPILERS = {"training.step", "training.scan"}
COUNTERS = {"training.apply"}
BUILDERS = {"sharding.layout"}
"""Creates states that are too large for one device under jit; it does not run steps or donate."""
READERS = {"core.placements"}
"""Reads arrays on their devices outside of steps, for fingerprints and checks of parameters. Donates nothing."""
STAGES = {"checkpoint.stage"}
"""Copies a state into the staging buffer of a Saver: it donates this buffer, never a state."""
SUMS = {"hooks.metric_sums_program"}
"""Accumulates metrics in an array, which it donates; it never donates a state."""
LOADED_WHEN_USED = {"checkpoint.store.orbax_arrays": {"orbax"}, "checkpoint.store.tensors": {"tensorstore"}}
"""Modules that `import jstep` does not load, and the packages that they may import at module level."""
SHARED_TRACES = {
    "core.meshes",  # a function that JAX may reject leaves nothing in the caller's program
    "clipping.norms",
    "optimizers.leafwise",
    "optimizers.apply_updates",
    "optimizers.conditional_update",
    "optimizers.eigenbases",
    "optimizers.newton_schulz",
    "optimizers.wrappers.exponential_moving_average",
}
"""Modules with a jit inside of a step: it compiles nothing, but traces a rule or norm once per shape of leaves."""


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for number, names in enumerate(LAYERS):
        if top in names:
            return number
    raise AssertionError(f"jstep/{module.replace('.', '/')}.py is not in a layer: add its package to LAYERS")


def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """Return the full names of all modules that a module imports, also inside of functions."""
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
                known = ".".join(inner) in MODULES or inner[0] in set().union(*LAYERS)
                is_module = base[0] == "jstep" and known and (len(base) == 1 or ".".join(inner) in MODULES)
                found.add(".".join([*base, alias.name] if is_module else base))
    return found


def inner_imports(module: str) -> set[str]:
    found = {name.removeprefix("jstep.") for name in imports(module) if name.split(".")[0] == "jstep"}
    assert "jstep" not in found, f"{module} imports jstep itself, which imports everything"
    return found - {module}


@pytest.mark.parametrize("module", MODULES)
def test_imports_respect_layers(module: str) -> None:
    for other in inner_imports(module):
        assert layer_of(other) <= layer_of(module), f"{module} imports {other}, which is in a higher layer"


def test_imports_have_no_cycles() -> None:
    seen: dict[str, bool] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join((*path, module))}"
        if module not in seen:
            for other in inner_imports(module) & MODULES.keys():
                visit(other, (*path, module))
            seen[module] = True

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in HOST])
def test_host_packages_are_independent(module: str) -> None:
    own = module.split(".")[0]
    for other in inner_imports(module):
        top = other.split(".")[0]
        assert top == own or other.split(".")[0] not in HOST, f"{module} imports {other}"
        assert top != "training", f"{module} imports training"


def test_the_root_contains_only_packages() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not [path for path in ROOT.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    assert (ROOT / "py.typed").exists()


SHARED_TESTS = {"architecture", "docstrings", "golden", "optimizer_contract", "public_names", "averages", "scripts"}


def test_tests_are_in_the_folders_of_their_packages() -> None:
    """Only tests of several packages are directly in tests/."""
    here = Path(__file__).parent
    assert {path.stem.removeprefix("test_") for path in here.glob("test_*.py")} <= SHARED_TESTS
    assert {"cli", "core", "data", "queues", "summary"} <= {path.name for path in here.iterdir() if path.is_dir()}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_underscore_modules_are_private_to_their_package(module: str) -> None:
    """A module that another package imports has no underscore, even if it is not public to users."""
    for other in inner_imports(module):
        parts = other.split(".")
        private = any(part.startswith("_") and part != "__main__" for part in parts)
        assert parts[0] == module.split(".")[0] or not private, f"{module} imports {other}"


def test_no_export_shadows_a_module() -> None:
    for name in jstep.__all__:
        if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists():
            assert inspect.ismodule(getattr(jstep, name)), f"jstep.{name} hides the package of that name"


def test_exports_have_jstep_as_their_module() -> None:
    for name in jstep.__all__:
        value = getattr(jstep, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == "jstep", f"jstep.{name}.__module__ is {value.__module__}"
            assert getattr(jstep, value.__qualname__) is value


def test_docstrings_do_not_begin_with_a_formula() -> None:
    """A tool that capitalizes the first letter of a docstring would change Adam's m into M."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                assert not re.match(r"[A-Za-z]\w? ?(=|·|\+|−|-=|/|\*|≤|<)", first), f"{module}: {first}"


def test_the_package_only_has_lazy_exports() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constant = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id in ("__all__", "__version__", "_EXPORTS") for t in node.targets
        )
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("_exports", "__getattr__", "__dir__")
        assert docstring or constant or lazy, ast.unparse(node)


FORBIDDEN = {"optax", "flax", "tensorflow", "haiku", "equinox", "chex", "torch", "keras"}
LAZY = {"orbax", "tensorstore", "tensorboard", "matplotlib", "sklearn", "google", "safetensors"}


@pytest.mark.parametrize("module", MODULES)
def test_third_party_imports(module: str) -> None:
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
        assert not lazy & {n.split(".")[0] for n in names}, f"{module} imports {names} at module level"


def jit_uses(tree: ast.AST) -> list[str]:
    """Return the uses of jit and similar functions in a module."""
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
    found = jit_uses(tree_of(module))
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


def test_training_compiles_donates_and_increments() -> None:
    """Otherwise the tests above would pass in a package that does not compile at all."""
    text = "".join(MODULES[name].read_text(encoding="utf-8") for name in PUBLIC_COMPILERS | COUNTERS)
    assert "jax.jit(" in text
    assert "donate_argnums" in text
    assert "global_step + 1" in text


def test_import_jstep_is_lightweight() -> None:
    code = "import sys, jstep; {}; print(*{{name.split('.')[0] for name in sys.modules}})"
    all_names = "[getattr(jstep, name) for name in jstep.__all__]"
    bare, complete = (
        subprocess.run(
            [sys.executable, "-c", code.format(expression)], capture_output=True, text=True, check=True, timeout=300
        )
        for expression in ("jstep.__all__", all_names)
    )
    assert "jax" not in bare.stdout.split(), "names must be loaded lazily"
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
    assert not set(complete.stdout.split()) & (heavy | FORBIDDEN)


# Sizes and names of files.

TESTS = sorted((ROOT.parent / "tests").rglob("*.py"))


@pytest.mark.parametrize(
    "path",
    [*MODULES.values(), *TESTS],
    ids=lambda path: str(path.relative_to(ROOT.parent)),
)
def test_files_are_shorter_than_300_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300


def test_test_files_have_unique_names() -> None:
    """tests/ has no packages, so pytest imports a file by its base name."""
    names = [path.name for path in TESTS if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
