"""Whole runs, beside what users would pick instead: the same three networks in five toolkits, with everything on.
In each task all have the same network, data, batch size, optimizer and schedule; all save checkpoints and the best one,
write TensorBoard's events, evaluate, stop early and resume. Each run is a separate process, one after the other and
interleaved; a figure is the median of the rounds. Seconds count from the start of the process and include imports. A
step is the mean over the second half of the steps, including evaluations and checkpoints between them. Lines are those
of the program and its network, without comments, docstrings, blank lines and what measures. Finally a run is killed by
SIGKILL halfway between two checkpoints, after about 70 % of its steps, and started again: the table shows whether the
loss of the last weights on the test set is the same, to the last digit, as without the SIGKILL.

    python tests/benchmarks/bench_whole_runs.py --environment DIR       # creates it if it does not exist
    python tests/benchmarks/bench_whole_runs.py                         # in .whole_runs
    python tests/benchmarks/bench_whole_runs.py --only jstep --only flax --task digits --rounds 1

The programs are in `whole_runs/`. The peers are installed by pip in their own environment, in the versions below; jstep
is that of this checkout. PyTorch for CPUs is smaller: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
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
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / ".whole_runs"
BOUND = 0.75
HEADER = """\
| task | toolkit | first step, s | a step, ms | whole, s | lines | test loss | after a SIGKILL | steps repeated |
|---|---|---:|---:|---:|---:|---:|---|---:|"""
LIMIT = 600
"""Seconds for a run."""

TOOLKITS = {
    "jstep": ("jstep", "networks_jax.py", ()),
    "flax": ("Flax + Optax + Orbax", "networks_flax.py", ("flax", "optax", "orbax-checkpoint")),
    "keras": ("Keras on JAX", "networks_keras.py", ("keras", "jax")),
    "lightning": ("Lightning", "networks_torch.py", ("lightning", "torch")),
    "hf": ("Hugging Face Trainer", "networks_torch.py", ("transformers", "torch")),
}
"""Name of a toolkit's program → its title, the file of its networks, its packages."""

PACKAGES = {
    "": [
        "torch==2.13.0",
        "accelerate==1.15.0",
        "flax==0.12.8",
        "google-crc32c==1.9.0",
        "jax==0.10.2",
        "lightning==2.6.6",
        "numpy==2.4.6",
        "optax==0.2.8",
        "orbax-checkpoint==0.12.8",
        "scikit-learn==1.9.1",
        "tensorboard==2.21.0",
        "tensorboardX==2.6.5",
        "transformers==5.23.0",
    ],
    "keras": ["tensorflow-cpu==2.21.0", "jax==0.10.2", "keras==3.15.1", "numpy==2.4.6", "tensorboard==2.21.0"],
}
"""Folder in the environment → what pip installs into it, the first one on its own.

Keras' TensorBoard callback needs TensorFlow. The other toolkits would import it, too, if they found it.
"""


@dataclasses.dataclass
class Outcome:
    """What a run printed.

    Attributes:
        whole: Seconds from the start of the process to its end.
        steps: Step → seconds from the start of the process until it was done, for the steps that the run marks.
        parameters: Number of parameters of the network.
        loss: Loss on the test set after the last step, with all digits; None if the run was killed.
    """

    whole: float = 0.0
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
    def per_step(self):
        """Seconds a step in the second half of the steps."""
        last = max(self.steps)
        return (self.steps[last] - self.steps[last // 2]) / (last - last // 2)


def create(environment):
    """Create the environment, for Keras another one inside of it."""
    for folder, packages in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", environment / folder], check=True)
        pip = [environment / folder / "bin" / "python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, packages[0]], check=True)
        subprocess.run([*pip, *packages], check=True)


def python_of(environment, toolkit):
    """Return the interpreter for a toolkit."""
    return environment / (toolkit if toolkit in PACKAGES else "") / "bin" / "python"


def title_of(environment, toolkit):
    """Return the title of a toolkit, with the versions of its packages in the environment."""
    title, _, packages = TOOLKITS[toolkit]
    code = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    command = [python_of(environment, toolkit), "-c", code, *packages]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    shown = ", ".join(f"{name} {version}" for name, version in zip(packages, found, strict=True))
    return f"{title} ({shown})" if shown else title


def run(python, toolkit, data, directory, killed=None):
    """Run a program to its end, or kill it after a step.

    Raises:
        RuntimeError: It failed, or took too long; the message has the end of its output.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    environment.pop("XLA_FLAGS", None)
    command = [python, HERE / f"run_{toolkit}.py", data, directory]
    began, outcome, log, is_killed = time.time(), Outcome(), [], False
    with subprocess.Popen(
        command, cwd=directory.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        for line in process.stdout:
            log.append(line)
            match line.split():
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
    if is_killed != (killed is not None) or (not is_killed and (process.returncode or outcome.loss is None)):
        raise RuntimeError(f"{toolkit}, {data}: exit code {process.returncode}\n{''.join(log[-40:])}")
    return outcome


def lines_of(toolkit, task):
    """Return the number of lines of a program: of its file, and of the part of the networks' file that it needs."""
    program = (HERE / f"run_{toolkit}.py").read_text(encoding="utf-8")
    networks = (HERE / TOOLKITS[toolkit][1]).read_text(encoding="utf-8")
    pieces = {name: node for node in ast.parse(networks).body for name in _defined(node)}
    wanted, new = set(), {name for name in pieces if name.lower() in (task, f"init_{task}")}
    while new:
        wanted |= new
        used = {one.id for name in new for one in ast.walk(pieces[name]) if isinstance(one, ast.Name)}
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
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in ignored
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, node.end_lineno + 1))
    return sum("marks" not in line.lower() for i, line in enumerate(text.splitlines(), 1) if i in code)


def measure(environment, task, toolkits, rounds, root):
    """Return, by toolkit, the outcomes of the rounds, and that of the run that resumed after a SIGKILL."""
    data, done = root / f"{task.name}.npz", {name: [] for name in toolkits}
    for number in range(rounds):
        turn = number % len(toolkits)
        for name in toolkits[turn:] + toolkits[:turn]:
            with tempfile.TemporaryDirectory(dir=root) as directory:
                done[name].append(run(python_of(environment, name), name, data, Path(directory, "run")))
            print(f"{task.name} {name}: {done[name][-1]}", file=sys.stderr, flush=True)
    resumed = {}
    for name in toolkits:
        with tempfile.TemporaryDirectory(dir=root) as directory:
            run(python_of(environment, name), name, data, Path(directory, "run"), task.killed)
            resumed[name] = run(python_of(environment, name), name, data, Path(directory, "run"))
        print(f"{task.name} {name}, resumed: {resumed[name]}", file=sys.stderr, flush=True)
    return done, resumed


def row(task, name, title, outcomes, resumed):
    """Return a row of the table."""

    def median(attribute):
        return statistics.median(getattr(outcome, attribute) for outcome in outcomes)

    losses = {outcome.loss for outcome in outcomes}
    same = "the same" if losses == {resumed.loss} else f"another, {float(resumed.loss):.4f}"
    if len(losses) > 1:
        same = f"another in each run, {float(resumed.loss):.4f}"
    repeated = task.killed - resumed.first_step + 1
    return (
        f"| {task.name} | {title} | {median('first'):.1f} | {median('per_step') * 1e3:.2f} | {median('whole'):.1f} | "
        f"{lines_of(name, task.name)} | {float(outcomes[0].loss):.4f} | {same} | {repeated} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help=f"created if it does not exist (default: {ENVIRONMENT.name})")
    parser.add_argument("--only", action="append", choices=TOOLKITS, help="a toolkit; repeatable (default: all)")
    parser.add_argument("--task", action="append", choices=whole_run_tasks.TASKS, help="repeatable (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="which part of the steps to run (default: 1)")
    given = parser.parse_args()
    environment = (given.environment or ENVIRONMENT).absolute()
    if not python_of(environment, "jstep").exists():
        if given.environment is None:
            sys.exit(f"{environment}: there is no environment; create it with --environment {ENVIRONMENT.name}")
        create(environment)
    is_quick = bool(os.environ.get("JSTEP_QUICK_BENCHMARKS"))
    rounds, share = (1, 0.1) if is_quick else (given.rounds, given.share)
    toolkits = given.only or list(TOOLKITS)
    titles = {name: title_of(environment, name) for name in toolkits}
    rows, is_good = [], True
    with tempfile.TemporaryDirectory() as root:
        for name in given.task or whole_run_tasks.TASKS:
            task = whole_run_tasks.write(name, Path(root, f"{name}.npz"), share)
            done, resumed = measure(environment, task, toolkits, rounds, Path(root))
            counts = {outcomes[0].parameters for outcomes in done.values()}
            if len(counts) != 1:
                raise RuntimeError(f"{name}: the networks differ: their numbers of parameters are {counts}")
            rows += [row(task, toolkit, titles[toolkit], done[toolkit], resumed[toolkit]) for toolkit in toolkits]
            whole = {toolkit: statistics.median(one.whole for one in outcomes) for toolkit, outcomes in done.items()}
            peers = {toolkit: seconds for toolkit, seconds in whole.items() if toolkit != "jstep"}
            if peers and "jstep" in whole:
                quickest = min(peers, key=peers.__getitem__)
                print(f"\n{name}, {task.steps} steps: seconds of the whole run")
                peer = f"the quickest peer, {TOOLKITS[quickest][0]}"
                is_good = report_ratio("jstep", peer, whole["jstep"] / peers[quickest], BOUND) and is_good
    print(f"\n{HEADER}")
    print("\n".join(rows))
    return is_good


if __name__ == "__main__":
    sys.exit(not main())
