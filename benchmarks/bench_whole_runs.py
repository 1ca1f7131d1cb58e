"""Whole runs: three networks in five toolkits, from the same weights, on the same batches, with the
same AdamW, clipping and schedule. All save checkpoints and the best one, write TensorBoard's
events, evaluate, stop early and resume. Seconds count from the start of the process. A step is the
mean over the second half of the steps, with evaluations and checkpoints; Keras runs 10 steps per
call. Lines are lines of code. Finally a run is killed by SIGKILL halfway between two checkpoints,
and started again: "the same" means that the test loss of its last weights is identical.

    python benchmarks/bench_whole_runs.py --environment DIR       # creates it if it does not exist
    python benchmarks/bench_whole_runs.py                         # in .whole_runs
    python benchmarks/bench_whole_runs.py --only jstep --only flax --task digits --rounds 1

The programs are in `whole_runs/`; each is written as its toolkit's documentation recommends for
speed, and what that gave is in the file. A last table, which the page does not show, splits the
first step: imports, reading the task, initialization as the toolkit's guide shows it, tracing and
compilation, and the rest, with an empty compilation cache; then the first step after the SIGKILL,
with the restore, and with JAX's programs in the cache. The peers are installed by pip in their own
environment, in the versions that the page shows; jstep is that of this checkout. PyTorch for CPUs
is smaller: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

import argparse
import ast
import dataclasses
import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from pathlib import Path

from _timing import report_ratio

sys.path.insert(0, str(Path(__file__).parent / "whole_runs"))

import whole_run_tasks

HERE = Path(__file__).parent / "whole_runs"
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".whole_runs"
BOUND = 1.0
"""Of the seconds of jstep to those of the quickest peer on JAX."""
AGREEMENT = {"JAX": 1e-4, "PyTorch": 1e-2}
"""By how much a toolkit's loss on the test set may differ from jstep's at the end."""
HEADER = """\
| task | toolkit | a step, ms | whole, s | lines | test loss | difference | after a SIGKILL | steps repeated |
|---|---|---:|---:|---:|---:|---:|---|---:|"""  # noqa: E501
STAGES_HEADER = """\
| to the first step, s | toolkit | import | data | init | compile | the rest | all | restarted: compile | all |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"""  # noqa: E501
LIMIT = 600
"""Seconds for a run."""


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A program.

    Attributes:
        title: What the tables call it.
        program: The file of the program.
        networks: The file of its networks.
        library: What computes: a key of `AGREEMENT`.
        packages: The packages whose versions the tables show.
        arguments: What follows the task and the directory on the command line.
    """

    title: str
    program: str
    networks: str
    library: str = "JAX"
    packages: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


TOOLKITS = {
    "jstep": Toolkit("jstep, auto", "run_jstep.py", "networks_jax.py", arguments=("auto",)),
    "jstep_single": Toolkit(
        "jstep, one step per call", "run_jstep.py", "networks_jax.py", arguments=("1",)
    ),
    "flax": Toolkit(
        "Flax + Optax + Orbax",
        "run_flax.py",
        "networks_flax.py",
        packages=("flax", "optax", "orbax-checkpoint"),
    ),
    "keras": Toolkit(
        "Keras on JAX", "run_keras.py", "networks_keras.py", packages=("keras", "jax")
    ),
    "lightning": Toolkit(
        "Lightning", "run_lightning.py", "networks_torch.py", "PyTorch", ("lightning", "torch")
    ),
    "hf": Toolkit(
        "Hugging Face Trainer",
        "run_hf.py",
        "networks_torch.py",
        "PyTorch",
        ("transformers", "torch"),
    ),
}

PACKAGES = [
    "torch==2.13.0",
    "accelerate==1.15.0",
    "flax==0.12.8",
    "google-crc32c==1.9.0",
    "jax==0.10.2",
    "keras==3.15.1",
    "lightning==2.6.6",
    "numpy==2.4.6",
    "optax==0.2.8",
    "orbax-checkpoint==0.12.8",
    "scikit-learn==1.9.1",
    "tensorboard==2.21.0",
    "tensorboardX==2.6.5",
    "transformers==5.23.0",
]
"""What pip installs into the environment, the first one on its own."""


@dataclasses.dataclass
class Outcome:
    """What a run printed.

    Attributes:
        whole: Seconds from the start of the process to its end.
        stages: Stage → seconds from the start of the process to its end: `import`, `data`, `init`.
        compile: Seconds in which JAX compiled, between `init` and the end of the first step.
        steps: Step → seconds from the start of the process until it was done, for the steps that
            the run marks.
        parameters: Number of parameters of the network.
        loss: Loss on the test set after the last step, with all digits; None if the run was killed.
    """

    whole: float = 0.0
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    compile: float = 0.0
    steps: dict[int, float] = dataclasses.field(default_factory=dict)
    parameters: int = 0
    loss: str | None = None

    @property
    def first_step(self):
        """The first step of the run: 1, or the one after the checkpoint that it resumed from."""
        return min(self.steps)

    @property
    def first(self):
        """Seconds to the end of the first step."""
        return self.steps[self.first_step]

    @property
    def parts(self):
        """The seconds of each stage, of the compilation, and of the rest of the first step."""
        imported, data, init = (self.stages[name] for name in ("import", "data", "init"))
        return (
            imported,
            data - imported,
            init - data,
            self.compile,
            self.first - init - self.compile,
        )

    @property
    def per_step(self):
        """Seconds a step in the second half of the steps."""
        last = max(self.steps)
        return (self.steps[last] - self.steps[last // 2]) / (last - last // 2)


def create(environment):
    """Create the environment."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [python_of(environment), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, PACKAGES[0]], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)


def python_of(environment):
    """Return the interpreter of the environment."""
    return environment / "bin" / "python"


def versions_of(environment, toolkit):
    """Return the versions of the packages of a toolkit in the environment."""
    packages = TOOLKITS[toolkit].packages
    code = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    command = [python_of(environment), "-c", code, *packages]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))


def run(python, toolkit, data, directory, killed=None):
    """Run a program to its end, or kill it after a step; the cache is beside its directory.

    Raises:
        RuntimeError: It failed, or took too long; the message has the end of its output.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": f"{directory}.cache",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    environment.pop("XLA_FLAGS", None)
    command = [
        python,
        HERE / TOOLKITS[toolkit].program,
        data,
        directory,
        *TOOLKITS[toolkit].arguments,
    ]
    began, outcome, log, is_killed = time.time(), Outcome(), [], False
    with subprocess.Popen(
        command,
        cwd=directory.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        for line in process.stdout:
            log.append(line)
            match line.split():
                case ["mark", "import" | "data" | "init" as stage, seconds]:
                    outcome.stages[stage] = float(seconds) - began
                case ["mark", "compile", seconds]:
                    outcome.compile = float(seconds)
                case ["mark", "step", step, seconds]:
                    outcome.steps[int(step)] = float(seconds) - began
                    if int(step) == killed:
                        process.kill()
                        is_killed = True
                case ["mark", "parameters", count]:
                    outcome.parameters = int(count)
                case ["mark", "test", loss, _]:
                    outcome.loss = loss
        process.wait()
        outcome.whole = time.time() - began
        late.cancel()
    if is_killed != (killed is not None) or (
        not is_killed and (process.returncode or outcome.loss is None)
    ):
        raise RuntimeError(
            f"{toolkit}, {data}: exit code {process.returncode}\n{''.join(log[-40:])}"
        )
    return outcome


def lines_of(toolkit, task):
    """Return the number of lines of a program: of its file, and of the part of the networks' file
    that it needs."""
    program = (HERE / TOOLKITS[toolkit].program).read_text(encoding="utf-8")
    networks = (HERE / TOOLKITS[toolkit].networks).read_text(encoding="utf-8")
    pieces = {name: node for node in ast.parse(networks).body for name in _defined(node)}
    wanted, new = set(), {name for name in pieces if name.lower() in (task, f"init_{task}")}
    while new:
        wanted |= new
        used = {
            one.id for name in new for one in ast.walk(pieces[name]) if isinstance(one, ast.Name)
        }
        new = (used & set(pieces)) - wanted
    needed = {pieces[name] for name in wanted}
    text = "\n".join(ast.get_source_segment(networks, node) for node in needed)
    return _code_lines(program) + _code_lines(text)


def _defined(node):
    """Return the names that a statement of a module binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _code_lines(text):
    """Return the number of lines with code, without docstrings and what measures."""
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in ignored
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, node.end_lineno + 1))
    return sum(
        "marks" not in line.lower() for i, line in enumerate(text.splitlines(), 1) if i in code
    )


def measure(environment, task, toolkits, rounds, root):
    """Return, by toolkit, the outcomes of the rounds, and that of the run that resumed after a
    SIGKILL."""
    data, done = root / f"{task.name}.npz", {name: [] for name in toolkits}
    for number in range(rounds):
        turn = number % len(toolkits)
        for name in toolkits[turn:] + toolkits[:turn]:
            with tempfile.TemporaryDirectory(dir=root) as directory:
                done[name].append(run(python_of(environment), name, data, Path(directory, "run")))
            print(f"{task.name} {name}: {done[name][-1]}", file=sys.stderr, flush=True)
    resumed = {}
    for name in toolkits:
        with tempfile.TemporaryDirectory(dir=root) as directory:
            run(python_of(environment), name, data, Path(directory, "run"), task.killed)
            resumed[name] = run(python_of(environment), name, data, Path(directory, "run"))
        print(f"{task.name} {name}, resumed: {resumed[name]}", file=sys.stderr, flush=True)
    return done, resumed


def median(outcomes, attribute):
    """The median of an attribute over the rounds."""
    return statistics.median(getattr(outcome, attribute) for outcome in outcomes)


def row(task, name, title, outcomes, resumed, reference):
    """Return a row of the first table; `reference` is the loss of jstep, or None."""
    losses = {outcome.loss for outcome in outcomes}
    same = "the same" if losses == {resumed.loss} else f"different: {float(resumed.loss):.4f}"
    if len(losses) > 1:
        same = f"different in each run: {float(resumed.loss):.4f}"
    repeated = task.killed - resumed.first_step + 1
    difference = "" if reference is None else f"{difference_of(outcomes, reference):.0e}"
    return (
        f"| {task.name} | {title} | {median(outcomes, 'per_step') * 1e3:.2f} | "
        f"{median(outcomes, 'whole'):.1f} | "
        f"{lines_of(name, task.name)} | {float(outcomes[0].loss):.4f} | "
        f"{difference} | {same} | {repeated} |"
    )


def stages_row(task, title, outcomes, resumed):
    """Return a row of the second table."""
    parts = map(statistics.median, zip(*(outcome.parts for outcome in outcomes), strict=True))
    seconds = [*parts, median(outcomes, "first"), resumed.compile, resumed.first]
    return f"| {task.name} | {title} | {' | '.join(f'{one:.1f}' for one in seconds)} |"


def difference_of(outcomes, reference):
    """By how much the losses differ from another one, at most."""
    return max(abs(float(outcome.loss) - float(reference)) for outcome in outcomes)


def refuse_another_training(name, done):
    """Raise an error unless all toolkits trained the same network in the same way.

    Raises:
        RuntimeError: The numbers of parameters differ, or the losses at the end.
    """
    counts = {outcomes[0].parameters for outcomes in done.values()}
    if len(counts) != 1:
        raise RuntimeError(f"{name}: the networks differ: their numbers of parameters are {counts}")
    for toolkit, outcomes in done.items():
        limit = AGREEMENT[TOOLKITS[toolkit].library]
        if "jstep" in done and difference_of(outcomes, done["jstep"][0].loss) > limit:
            losses = {other: [one.loss for one in found] for other, found in done.items()}
            raise RuntimeError(
                f"{name}: the loss of {toolkit} differs from jstep's by more than {limit}: {losses}"
            )


def report_task(task, done, resumed):
    """Print the ratios of a task; return whether the bounds hold."""
    about = f"{task.name}, {task.steps} steps"
    is_good = report_quickest(f"{about}: seconds of the whole run", done, "whole")
    again = {toolkit: [outcome] for toolkit, outcome in resumed.items()}
    is_good &= report_quickest(f"{about}: seconds from a restart to its first step", again, "first")
    if {"jstep_single", "flax"} <= set(done):
        alike = {"jstep": done["jstep_single"], "flax": done["flax"]}
        is_good &= report_quickest(f"{about}: a step in its loop, one per call", alike, "per_step")
    return is_good


def report_quickest(title, outcomes, attribute):
    """Print jstep's ratio to the quickest program on each library; return whether the bounds
    hold."""
    seconds = {
        name: median(found, attribute) for name, found in outcomes.items() if name != "jstep_single"
    }
    ours, is_good = seconds.pop("jstep", None), True
    if ours is None or not seconds:
        return True
    print(f"\n{title}")
    for library, bound in (("JAX", BOUND), ("PyTorch", None)):
        peers = {name: one for name, one in seconds.items() if TOOLKITS[name].library == library}
        if peers:
            quickest = min(peers, key=peers.__getitem__)
            peer = f"the quickest on {library}, {TOOLKITS[quickest].title}"
            is_good &= report_ratio("jstep", peer, ours / peers[quickest], bound)
    return is_good


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environment",
        type=Path,
        help=f"created if it does not exist (default: {ENVIRONMENT.name})",
    )
    parser.add_argument(
        "--only", action="append", choices=TOOLKITS, help="a toolkit; repeatable (default: all)"
    )
    parser.add_argument(
        "--task", action="append", choices=whole_run_tasks.TASKS, help="repeatable (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--share", type=float, default=1.0, help="which part of the steps to run (default: 1)"
    )
    given = parser.parse_args()
    environment = (given.environment or ENVIRONMENT).absolute()
    if not python_of(environment).exists():
        if given.environment is None:
            sys.exit(
                f"{environment}: there is no environment; "
                f"create it with --environment {ENVIRONMENT.name}"
            )
        create(environment)
    is_quick = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))
    rounds, share = (1, 0.1) if is_quick else (given.rounds, given.share)
    toolkits = given.only or list(TOOLKITS)
    versions = {TOOLKITS[name].title: versions_of(environment, name) for name in toolkits}
    rows, stages, is_good = [], [], True
    with tempfile.TemporaryDirectory() as root:
        for name in given.task or whole_run_tasks.TASKS:
            task = whole_run_tasks.write(name, Path(root, f"{name}.npz"), share)
            done, resumed = measure(environment, task, toolkits, rounds, Path(root))
            refuse_another_training(name, done)
            reference = done["jstep"][0].loss if "jstep" in done else None
            for toolkit in toolkits:
                given_row = TOOLKITS[toolkit].title, done[toolkit], resumed[toolkit]
                rows.append(row(task, toolkit, *given_row, reference))
                stages.append(stages_row(task, *given_row))
            is_good = report_task(task, done, resumed) and is_good
    print(f"\n{HEADER}", *rows, sep="\n")
    peers = {title: shown for title, shown in versions.items() if shown}
    print(
        "\n| toolkit | versions |\n|---|---|",
        *(f"| {title} | {peers[title]} |" for title in peers),
        sep="\n",
    )
    # Indented, as they are not on the page.
    print(*("  " + line for line in (*STAGES_HEADER.splitlines(), *stages)), sep="\n")
    return is_good


if __name__ == "__main__":
    sys.exit(not main())
