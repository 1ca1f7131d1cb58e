"""Architecture: imports between modules, modules that may compile or donate, lazy loading.

Each rule is one test that lists all offenders.
"""

import ast
import collections
import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from processes import python
from source_files import MODULES, PACKAGE, TESTS, name_of, nodes_of, text_of, tree_of

import jstep

# A module may import from its own layer and from the layers before it; cycles are not allowed.
KERNEL_LAYERS = [
    {"core"},
    {"metrics", "schedules", "slots", "stores"},
    {"state"},
    {"array_store", "data", "differentiate"},
    {"optimizers"},
    {"checkpoint", "training"},
    {"metering"},
    {"hooks"},
    {"compiling"},
    {"origin"},
    {"loop"},
    {"running"},
]
"""The kernel trains, saves, restores and resumes by itself, without the rooms below."""
LAYERS = [
    *KERNEL_LAYERS,
    {"distributed", "queues", "showing", "record", "summary", "weights"},
    {"evaluating", "logs"},
    {"watching"},
    {"look", "__main__"},
    {"debug", "planning"},
]
KERNEL = set().union(*KERNEL_LAYERS)
OTHERS = set().union(*LAYERS) - KERNEL - {"__main__"}
HOST = {"checkpoint", "data", "queues", "summary"}
"""Rooms of the host side that do without each other; only loaders of `data` read queues."""
STEP = {
    "core",
    "differentiate",
    "distributed",
    "metrics",
    "optimizers",
    "schedules",
    "showing",
    "slots",
    "state",
    "stores",
    "training",
}
"""The rooms of a training step. Rooms of the host side may compile helpers, but they do not define
steps."""
PUBLIC_COMPILERS = {"training.step", "training.looped"}
COUNTERS = {"training.apply_gradients"}
BUILDERS = {"state.sharding"}
"""Creates states that are too large for one device under jit; it does not run steps or donate."""
READERS = {
    "core.placement",
    "state.nonfinite",
    "training.optimizer_metrics",
    "training.skipped_updates",
}
"""Reads arrays on their devices outside of steps, for fingerprints, checks of parameters,
hyperparameters and skipped updates of steps that are compiled elsewhere. Donates nothing."""
SUMS = {"metering.metric_sums"}
"""Accumulates metrics in an array, which it donates; it never donates a state."""
LOADED_WHEN_USED = {
    "array_store.array_reader": {"tensorstore"},
    "array_store.array_writer": {"tensorstore"},
    "array_store.chunk_files": {"tensorstore"},
    "array_store.shared_reads": set(),
}
"""Modules that `import jstep` does not load, and the packages that they may import at module
level."""
SHARED_TRACES = {
    "core.meshes",  # a function that JAX may reject leaves nothing in the caller's program
    "differentiate.clipping",
    "differentiate.lanes",
    "optimizers.averages",
    "optimizers.compact",
    "optimizers.guards",
    "optimizers.muon",
    "optimizers.rules",
    "optimizers.soap",
    "optimizers.updates",
}
"""Modules with a jit inside of a step: it compiles nothing, but traces a rule or norm once per
shape of leaves."""


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for number, names in enumerate(LAYERS):
        if top in names:
            return number
    raise AssertionError(
        f"jstep/{module.replace('.', '/')}.py is not in a layer: add its package to LAYERS"
    )


def test_the_kernel_imports_no_other_room() -> None:
    """What is attached to a run is named in one list, and told of it by `loop.observer.Observer`
    and `Hook`."""
    assert not [
        f"{module} imports {other}"
        for module, other in pairs()
        if package_of(module) in KERNEL and other != "jstep" and package_of(other) not in KERNEL
    ]
    strings = {
        module
        for module, path in MODULES.items()
        if package_of(module) in KERNEL
        and re.search(rf"[\"']jstep\.({'|'.join(OTHERS)})\b", text_of(path))
    }
    assert strings <= {"running.attached"}, "a room is named in a string"


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the full names of all modules that a module imports, also inside of functions."""
    found = set()
    package = ["jstep", *module.split(".")]
    if MODULES[module].name != "__init__.py":
        package = package[:-1]
    for node in nodes_of(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            for alias in node.names:
                inner = [*base[1:], alias.name]
                known = ".".join(inner) in MODULES or inner[0] in set().union(*LAYERS)
                is_module = (
                    base[0] == "jstep" and known and (len(base) == 1 or ".".join(inner) in MODULES)
                )
                found.add(".".join([*base, alias.name] if is_module else base))
    return frozenset(found)


@functools.cache
def inner_imports(module: str) -> frozenset[str]:
    """Return the modules of jstep that a module imports."""
    found = {
        name.removeprefix("jstep.") for name in imports(module) if name.split(".")[0] == "jstep"
    }
    return frozenset(found - {module})


def pairs() -> Iterator[tuple[str, str]]:
    """Yield each module of jstep with each module of jstep that it imports."""
    for module in MODULES:
        for other in inner_imports(module):
            yield module, other


def package_of(module: str) -> str:
    return module.split(".")[0]


def test_modules_do_not_import_jstep_itself() -> None:
    """It imports everything."""
    wrong = [module for module, other in pairs() if other == "jstep"]
    assert not wrong, "import a name from the module that defines it"


def test_imports_respect_layers() -> None:
    inner = ((module, other) for module, other in pairs() if other != "jstep")
    wrong = [
        f"{module} imports {other}" for module, other in inner if layer_of(other) > layer_of(module)
    ]
    assert not wrong, (
        "move the function to a lower layer, "
        "or hand the value on as an argument (CONTRIBUTING, Layout)"
    )


def test_the_picture_of_the_rooms_is_the_current_one() -> None:
    drawing = runpy.run_path(str(PACKAGE.parent / "dev" / "rooms.py"))
    assert drawing["PICTURE"].read_text(encoding="utf-8") == drawing["picture"](), (
        "python dev/rooms.py"
    )


def test_each_room_lists_its_files() -> None:
    for room in set(map(package_of, MODULES)) - {"", "__main__", "__init__"}:
        listed = re.findall(r"^- `(\w+)`: ", text_of(PACKAGE / room / "__init__.py"), re.MULTILINE)
        modules = sorted(path.stem for path in (PACKAGE / room).glob("[a-z]*.py"))
        assert sorted(listed) == modules, room


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


def test_nothing_is_unpickled() -> None:
    """Unpickling runs code of whoever wrote the file: a checkpoint, weights or an event file may be
    a stranger's."""
    unpicklers = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
    found = [
        (module, name)
        for module in MODULES
        for name in imports(module)
        if name.split(".")[0] in unpicklers
    ]
    assert found == []
    calls = (
        node for path in MODULES.values() for node in nodes_of(path) if isinstance(node, ast.Call)
    )
    assert not [
        ast.unparse(call)
        for call in calls
        if any(word.arg == "allow_pickle" for word in call.keywords)
    ]
    loads = re.compile(r"\b(np|numpy|torch)\.load\(")
    assert not [module for module, path in MODULES.items() if loads.search(text_of(path))]


def test_host_packages_are_independent() -> None:
    assert not [
        f"{module} imports {other}"
        for module, other in pairs()
        if package_of(module) in HOST
        and package_of(other) != package_of(module)
        and package_of(other) in {*HOST, "training"}
        and (package_of(module), package_of(other)) != ("data", "queues")
    ]


def test_the_root_contains_only_packages() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert not [
        path for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").exists()
    ]
    assert (PACKAGE / "py.typed").exists()


SHARED_TESTS = {
    "architecture",
    "dense_statements",
    "docstrings",
    "golden",
    "golden_contents",
    "names",
    "optimizer_contract",
    "formats",
    "public_names",
    "averages",
    "scripts",
    "suite",
}


def test_tests_are_in_the_folders_of_their_packages() -> None:
    """Only tests of several packages are directly in tests/."""
    here = Path(__file__).parent
    assert {path.stem.removeprefix("test_") for path in here.glob("test_*.py")} <= SHARED_TESTS
    assert {"core", "data", "queues", "summary", "look"} <= {
        path.name for path in here.iterdir() if path.is_dir()
    }


def test_underscore_modules_are_private_to_their_package() -> None:
    """A module that another package imports has no underscore, even if it is not public to
    users."""
    assert not [
        f"{module} imports {other}"
        for module, other in pairs()
        if package_of(other) != package_of(module)
        and any(part.startswith("_") and part != "__main__" for part in other.split("."))
    ]


NAMESPACES = {"distributed", "metrics", "summary"}
"""Packages whose names users type: `jstep.summary.scalar`."""


def test_packages_export_nothing() -> None:
    """A name has one home, the module that defines it, and one list, in `jstep/__init__.py`."""
    packages = {name: path for name, path in MODULES.items() if path.name == "__init__.py"}
    more = {
        name: len(tree_of(path).body) for name, path in packages.items() if name not in NAMESPACES
    }
    assert not {name: count for name, count in more.items() if count != 1}, "more than a docstring"


def test_names_are_imported_from_where_they_are_defined() -> None:
    """Tests may use the namespaces as users do."""
    namespaces = {f"jstep.{name}" for name in NAMESPACES}
    found = [
        f"{name_of(path)}: {name} of {module}"
        for path in [PACKAGE / "__init__.pyi", *MODULES.values(), *TESTS]
        for module, names in FROM.findall(text_of(path))
        for name in re.findall(r"(?<!as )\b[A-Za-z_]\w*", re.sub(r"#.*|\bas\b \w+", "", names))
        if not (path in TESTS and module in namespaces) and not is_defined_in(module, name)
    ]
    assert not found


FROM = re.compile(r"^ *from (jstep\.[\w.]+) import (\([^)]*\)|.+)", re.MULTILINE)
"""The statements that import names of a module of jstep."""


def is_defined_in(module: str, name: str) -> bool:
    inner = module.removeprefix("jstep.")
    return f"{inner}.{name}" in MODULES or name in names_defined_in(inner)


@functools.cache
def names_defined_in(module: str) -> set[str]:
    found = set()
    for node in tree_of(MODULES[module]).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {
            one.id
            for target in targets
            if target
            for one in ast.walk(target)
            if isinstance(one, ast.Name)
        }
    return found


def test_no_export_shadows_a_module() -> None:
    for name in jstep.__all__:
        if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists():
            assert inspect.ismodule(getattr(jstep, name)), (
                f"jstep.{name} hides the package of that name"
            )


def test_functions_and_exceptions_have_jstep_as_their_module() -> None:
    """As errors and pickles show them; other classes have the module with their source."""
    for name in jstep.__all__:
        value = getattr(jstep, name)
        if inspect.isfunction(value) or (
            inspect.isclass(value) and issubclass(value, BaseException)
        ):
            assert value.__module__ == "jstep", f"jstep.{name}.__module__ is {value.__module__}"
            assert getattr(jstep, value.__qualname__) is value


def test_docstrings_do_not_begin_with_a_formula() -> None:
    """A tool that capitalizes the first letter of a docstring would change Adam's m into M."""
    first_lines = [
        (module, (ast.get_docstring(node) or "").split("\n")[0])
        for module, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    ]
    formula = re.compile(r"[A-Za-z]\w? ?(=|·|\+|−|-=|/|\*|≤|<)")
    assert not [f"{module}: {first}" for module, first in first_lines if formula.match(first)]


def test_the_package_only_has_lazy_exports() -> None:
    functions = {"__getattr__", "__dir__"}
    for node in tree_of(PACKAGE / "__init__.py").body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constant = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name)
            and t.id in ("__all__", "__doc__", "__version__", "_NAMES", "_LINES", "_EXPORTS")
            for t in node.targets
        )
        lazy = isinstance(node, ast.FunctionDef) and node.name in functions
        assert docstring or constant or lazy, ast.unparse(node)


FORBIDDEN = {"optax", "flax", "tensorflow", "haiku", "equinox", "chex", "torch", "keras"}
LAZY = {"orbax", "tensorstore", "tensorboard", "matplotlib", "sklearn", "google", "safetensors"}


def imports_on_loading(module: str) -> set[str]:
    """Return the third-party packages that a module imports at module level."""
    names = []
    for node in tree_of(MODULES[module]).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


def test_third_party_imports() -> None:
    found = [(module, name) for module in MODULES for name in imports(module)]
    assert not [
        f"{module} imports {name}" for module, name in found if name.split(".")[0] in FORBIDDEN
    ]
    private = ("jax._src", "jaxlib")
    assert not [
        f"{module} imports {name}, which is private"
        for module, name in found
        if name.startswith(private)
    ]
    eager = {
        module: LAZY & imports_on_loading(module) - LOADED_WHEN_USED.get(module, set())
        for module in MODULES
    }
    assert not {module: names for module, names in eager.items() if names}, (
        "imported at module level"
    )


def jit_uses(module: str) -> list[str]:
    """Return the uses of jit and similar functions in a module."""
    nodes = nodes_of(MODULES[module])
    found = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in {"jit", "pjit", "pmap"}
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax"):
            found += [alias.name for alias in node.names if alias.name in {"jit", "pjit", "pmap"}]
    return found


def test_only_training_compiles() -> None:
    allowed = PUBLIC_COMPILERS | BUILDERS | READERS | SHARED_TRACES
    checked = [module for module in MODULES if package_of(module) in STEP and module not in allowed]
    assert not {module: jit_uses(module) for module in checked if jit_uses(module)}


def donations_and_increments(module: str) -> list[str]:
    """Return the places where a module donates an argument or increments the step."""
    found = []
    for node in nodes_of(MODULES[module]):
        donates = isinstance(node, ast.keyword) and (node.arg or "").startswith("donate_arg")
        called = node.func if isinstance(node, ast.Call) else None
        if donates or "increment_global_step" in (
            getattr(called, "attr", ""),
            getattr(called, "id", ""),
        ):
            found.append(ast.unparse(node))
    return found


def test_only_training_donates_and_increments() -> None:
    checked = [module for module in MODULES if module not in PUBLIC_COMPILERS | COUNTERS | SUMS]
    found = {module: donations_and_increments(module) for module in checked}
    assert not {module: places for module, places in found.items() if places}


def test_training_compiles_donates_and_increments() -> None:
    """Otherwise the tests above would pass in a package that does not compile at all."""
    text = "".join(text_of(MODULES[name]) for name in PUBLIC_COMPILERS | COUNTERS)
    assert "jax.jit(" in text
    assert "donate_argnums" in text
    assert "global_step + 1" in text


def test_import_jstep_is_lightweight() -> None:
    loaded = "print(*{name.split('.')[0] for name in sys.modules}); "
    all_names = "[getattr(jstep, name) for name in jstep.__all__]; "
    bare, complete = python(
        "-c", f"import sys, jstep; jstep.__all__; {loaded}{all_names}{loaded}"
    ).splitlines()
    assert "jax" not in bare.split(), "names must be loaded lazily"
    heavy = {
        "orbax", "tensorboard", "tensorboardX", "matplotlib", "sklearn", "tensorstore", "pandas",
        "safetensors",
    }  # fmt: skip
    assert not set(complete.split()) & (heavy | FORBIDDEN)


def test_no_path_that_is_made_from_a_file_is_stale() -> None:
    """A file that moves leaves such a path behind, and what compares with it is silently false."""
    root = str(PACKAGE)
    stale = []
    for name in MODULES:
        module = importlib.import_module(f"jstep.{name}" if name else "jstep")
        for variable, value in vars(module).items():
            is_own = not variable.startswith("__")
            paths = [str(value)] if is_own and isinstance(value, str | Path) else []
            inside = [path for path in paths if path.startswith(root)]
            stale += [f"{name}: {variable}={path}" for path in inside if not Path(path).exists()]
    assert not stale


def test_rooms_are_flat_and_each_has_a_layer() -> None:
    rooms = {package_of(name) for name in MODULES} - {"", "__main__", "__init__"}
    assert rooms == set().union(*LAYERS) - {"__main__"}
    assert not [name for name in MODULES if name.count(".") > 1], "a room is flat"


CALLED_BY_NAME = {"_repr_html_", "_cond", "_shard_map"}
"""Methods that notebooks call, or that are looked up by the name of an operation."""


def test_nothing_is_unused() -> None:
    """A function, class or constant of a module that is not public, or a private method, is used in
    the package."""
    used: collections.Counter[str] = collections.Counter()
    for path in MODULES.values():
        for node in nodes_of(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.isidentifier()
            ):
                used[node.value] += 1  # looked up by its name
    packages = "".join(text_of(PACKAGE / room / "__init__.py") for room in sorted(NAMESPACES))
    public = {*jstep.__all__, *re.findall(r"\w+", packages)} | {
        command
        for module in MODULES
        for command in re.findall(r'"[\w.]+:(\w+)",?\s*\)', text_of(MODULES[module]))
    }
    found = []
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            names = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.ClassDef):
                methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
                names += [name for name in methods if re.match(r"_[^_]", name)]
            found += [
                f"{module}.{name}"
                for name in names
                if not used[name] and name not in public | CALLED_BY_NAME
            ]
    assert not [name for name in found if not name.endswith("__")]


def test_what_makes_an_optimizer_or_a_schedule_is_public() -> None:
    public = set(jstep.__all__)
    makers = {
        f"{module}.{node.name}": node.name
        for module, path in MODULES.items()
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
        and any("makes_" in ast.unparse(one) for one in node.decorator_list)
    }
    assert len(makers) > 60
    missing = [
        where for where, name in makers.items() if not name.startswith("_") and name not in public
    ]
    assert not missing, "list it in jstep/__init__.py, or name it _…"


def test_files_of_tests_are_not_too_long() -> None:
    lines = {name_of(path): len(text_of(path).splitlines()) for path in TESTS}
    assert not {name: count for name, count in lines.items() if count > 600}
