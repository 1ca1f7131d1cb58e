"""The house: which module may import which, who compiles and donates, and what a bare import loads."""

import ast
import importlib
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
    {"sharding", "schedules", "clipping"},
    {"state"},
    {"optimizers"},
    {"differentiate"},
    {"training"},
    {"distributed", "stores"},
    {"data", "queues", "checkpoint", "summary"},
    {"fingerprints"},
    {"hooks"},
    {"evaluating"},
    {"loop"},
    {"tools"},
    {"cli", "__main__"},
]
HOUSE = set().union(*STOREYS)
HOST = STOREYS[7]
STEP = set().union(*STOREYS[:7])
"""What a training step is made of. The host side may compile helpers of its own; it never steps."""
PUBLIC_COMPILERS = {"training.step", "training.scan"}
COUNTERS = {"training.apply"}
BUILDERS = {"sharding.layout"}
"""A state too large for one device is made under jit, once; nothing there steps or donates."""
STAGES = {"checkpoint.stage"}
"""Copies a state into memory that a Saver keeps for it: donates its own arrays, never a state."""
LOADED_WHEN_USED = {"checkpoint.store.orbax_arrays": {"orbax"}, "checkpoint.store.tensors": {"tensorstore"}}
"""Modules that a bare `import jstep` does not load, and what they may import at their top."""
SHARED_TRACES = {
    "optimizers.leafwise",
    "optimizers.apply_updates",
    "optimizers.newton_schulz",
    "optimizers.wrappers.exponential_moving_average",
}
"""A leaf's rule is traced once for all leaves of a shape: a jit inside the step, which compiles nothing itself."""


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


OF_ALL_PACKAGES = {
    "architecture",
    "averages",
    "docstrings",
    "edges",
    "errors",
    "golden",
    "optimizer_contract",
    "readme",
}


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
            isinstance(t, ast.Name) and t.id in ("__all__", "__version__", "_PACKAGES") for t in node.targets
        )
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        assert docstring or names or lazy, ast.unparse(node)


FORBIDDEN = {"optax", "flax", "tensorflow", "haiku", "equinox", "chex", "torch", "keras"}
LAZY = {"orbax", "tensorstore", "tensorboard", "matplotlib", "sklearn", "google"}


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
    assert module in PUBLIC_COMPILERS | BUILDERS | SHARED_TRACES or not found, f"{module} compiles: {found}"


@pytest.mark.parametrize("module", MODULES)
def test_only_training_donates_and_increments(module: str) -> None:
    if module in PUBLIC_COMPILERS | COUNTERS | STAGES:
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
    heavy = {"orbax", "tensorboard", "tensorboardX", "matplotlib", "tensorflow", "sklearn", "tensorstore", "pandas"}
    assert not set(done.stdout.split()) & (heavy | FORBIDDEN)


# The public names.


def test_all_is_complete_and_true() -> None:
    assert all(hasattr(jstep, name) for name in jstep.__all__)
    assert len(set(jstep.__all__)) == len(jstep.__all__)
    public = {name for name in vars(jstep) if not name.startswith("_") and name not in HOUSE}
    assert public <= set(jstep.__all__), f"reachable but not in __all__: {sorted(public - set(jstep.__all__))}"
    assert dir(jstep) == sorted(jstep.__all__)


def test_type_checkers_are_told_of_each_name() -> None:
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    told = {a.name: n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert sorted(told) == sorted(jstep.__all__)
    for name, package in told.items():
        assert package == "jstep" or name in importlib.import_module(package).__all__
    (names,) = (n.value for n in tree.body if isinstance(n, ast.Assign))
    assert ast.literal_eval(names) == jstep.__all__


def test_the_packages_docstring_is_its_map() -> None:
    words = re.findall(r"\w+", jstep.__doc__ or "")
    lacking = [name for name in jstep.__all__ if name not in words]
    assert not lacking, f"help(jstep) shows what there is: add {lacking} to its docstring, where they belong"
    assert len((jstep.__doc__ or "").splitlines()) < 90


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'typing'"):
        jstep.typing
    with pytest.raises(AttributeError, match="no attribute 'adamm'"):
        jstep.adamm


def test_any_name_may_be_asked_for_first_where_jax_is_tracing() -> None:
    """Importing makes no arrays: under a trace they would be tracers, and leak."""
    code = (
        "import jax, jstep\n"
        "with jax.checking_leaks():\n"
        "    jax.jit(lambda x: (x, [getattr(jstep, name) for name in jstep.__all__])[0])(1.0)\n"
        "assert jstep.summary.merge_all() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


CONTRACT = """
    TrainState create_global_step get_global_step get_or_create_global_step global_step increment_global_step
    get_slot_names get_slot Optimizer gradient_descent momentum adagrad adam rmsprop ftrl IndexedSlices chain scope
    clip_gradients partition gradients stop_gradient compute_gradients apply_gradients minimize scan_steps
    GATE_NONE GATE_OP GATE_GRAPH AggregationMethod constant exponential_decay natural_exp_decay inverse_time_decay
    polynomial_decay piecewise_constant cosine_decay cosine_decay_restarts linear_cosine_decay linear_warmup join
    shift clip_by_value clip_by_norm clip_by_average_norm clip_by_global_norm global_norm ExponentialMovingAverage
    with_moving_average averaged_params
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract_is_there(name: str) -> None:
    assert name in jstep.__all__


SIGNATURES = {
    "gradient_descent": "(learning_rate)",
    "momentum": "(learning_rate, momentum, use_nesterov=False)",
    "adagrad": "(learning_rate, initial_accumulator_value=0.1)",
    "adam": "(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08)",
    "rmsprop": "(learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10, centered=False)",
    "ftrl": "(learning_rate, learning_rate_power=-0.5, initial_accumulator_value=0.1, "
    "l1_regularization_strength=0.0, l2_regularization_strength=0.0, l2_shrinkage_regularization_strength=0.0, "
    "beta=0.0)",
    "exponential_decay": "(learning_rate, decay_steps, decay_rate, staircase=False)",
    "natural_exp_decay": "(learning_rate, decay_steps, decay_rate, staircase=False)",
    "inverse_time_decay": "(learning_rate, decay_steps, decay_rate, staircase=False)",
    "polynomial_decay": "(learning_rate, decay_steps, end_learning_rate=0.0001, power=1.0, cycle=False)",
    "piecewise_constant": "(boundaries, values)",
    "cosine_decay": "(learning_rate, decay_steps, alpha=0.0)",
    "cosine_decay_restarts": "(learning_rate, first_decay_steps, t_mul=2.0, m_mul=1.0, alpha=0.0)",
    "linear_cosine_decay": "(learning_rate, decay_steps, num_periods=0.5, alpha=0.0, beta=0.001)",
    "linear_warmup": "(schedule, warmup_steps)",
    "join": "(schedules, boundaries)",
    "shift": "(schedule, start_step)",
    "clip_by_value": "(t, min, max)",
    "clip_by_norm": "(t, clip_norm, axes=None)",
    "clip_by_average_norm": "(t, clip_norm)",
    "clip_by_global_norm": "(tree, clip_norm, use_norm=None)",
    "global_norm": "(tree)",
    "create_global_step": "(value=0)",
    "get_global_step": "(state)",
    "get_or_create_global_step": "(state)",
    "global_step": "(state)",
    "increment_global_step": "(state, amount=1)",
    "get_slot_names": "(state)",
    "get_slot": "(state, name, path=None)",
    "gradients": "(fn, xs, grad_ys=None)",
    "stop_gradient": "(x)",
    "apply_gradients": "(state, grads, optimizer, *, increment_global_step=True)",
    "ExponentialMovingAverage": "(decay, num_updates=False, zero_debias=False, name='ExponentialMovingAverage', "
    "start_step=0, every=1)",
    "with_moving_average": "(optimizer, ema, var_list=None)",
    "averaged_params": "(state, name='ExponentialMovingAverage')",
    "partition": "(optimizers, labels)",
    "scope": "(name, optimizer)",
    "IndexedSlices": "(values, indices, dense_shape)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_contracts(name: str) -> None:
    signature = inspect.signature(getattr(jstep, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


FUNCTIONS = [name for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]
CLASSES = [name for name in jstep.__all__ if inspect.isclass(getattr(jstep, name))]
EXAMPLES_WANTED = [name for name in FUNCTIONS if name not in {"get_global_step", "get_or_create_global_step"}]


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_public_names_have_docstrings(name: str) -> None:
    doc = getattr(jstep, name).__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "the docstring Python makes up for a dataclass"


@pytest.mark.parametrize("name", EXAMPLES_WANTED)
def test_public_functions_have_a_runnable_example(name: str) -> None:
    assert ">>> " in getattr(jstep, name).__doc__
