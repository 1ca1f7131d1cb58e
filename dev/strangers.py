"""What somebody else may have written: mutants of each file that jstep reads, with right checksums,
and its readers.

    .venv/bin/python dev/strangers.py                   # a minute of mutants, as in the nightly run
    .venv/bin/python dev/strangers.py --count 20000 --seed 7

A run is made once, with checkpoints, positions, records, logs and weights. For each mutant one of
its files is changed where its structure means something: a number, a name, a key, a place, a node
of the database of arrays, the bytes of an event; or it becomes a link, a FIFO, a directory, or has
another name. Then readers of that file are called. It is a defect if one opens or lists anything
outside of the run, makes a socket, starts a program, takes more than ten seconds of CPU or 400 MB,
raises what it does not document, or if control characters are in what it prints, logs or warns of,
or in the traceback of what it raises. Audit hooks of Python see the first three.

Whose run it is decides what may be opened (`PLACES`): the reader's own one; a copy of one; that of
another host; a copy beside the run that it is of. In some, the mutation is a link that appears
while the run takes steps.
"""

import argparse
import contextlib
import faulthandler
import functools
import io
import json
import logging
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import databases  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jstep  # noqa: E402
from jstep.logs.fingerprint_log import read_log  # noqa: E402
from jstep.look import cli  # noqa: E402
from jstep.stores.event_files import frame  # noqa: E402

SECONDS = 10
"""Seconds of CPU that a reader may take for a mutant of some kB. It is stopped after ten times as
many by the clock."""
MEGABYTES = 400
"""Megabytes that it may take."""
PRIME = 2**61 - 1
ODD = [
    *(0, 1, -1, 2**31, 2**63 - 1, 2**63, PRIME, 3 * PRIME, 10**18, 10**400, 1e308, float("nan"),
      float("inf"), 0.5),
    *("", "x", "../../outside/secret", "/etc/passwd", "s3://stranger/x", "gs://stranger/x",
      "/net/stranger/x", "\x1b[2J"),
    socket.gethostname(),
    *("\ud800", "a" * 5000, "9" * 5000, "$files/a", "float64", "uint8", "no dtype", "\u202e",
      "key<fry>"),
    *([], {}, None, True, [[]] * 50, {"$dict": [[n * PRIME, 0] for n in range(3)]},
      {"$int": "f" * 500}),
    *({"$bytes": {"$file": "a"}}, {"$array": {"dtype": "<f8", "shape": [2**40], "data": ""}},
      {"$tuple": 7}),
]  # fmt: skip
CONTROL = "\x1b[31m\nforged\x9b"
"""What is put into names: it colors a terminal, and begins a line that looks like one of jstep."""
MAX_DEFECTS = 20
"""The number of defects after which the search ends."""
PLACES = ["own", "own", "own", "copy", "of another host", "beside"]
"""Whose run is changed, by how often. Only of what is not the reader's own, paths elsewhere must
not be opened."""


class Draw(random.Random):
    """A generator of mutants.

    Attributes:
        elsewhere: Paths that exist, and that records of the mutant must not lead to.
    """

    elsewhere: tuple[str, ...] = ()

    def odd(self):
        return self.choice([*ODD, *self.elsewhere, *self.elsewhere])


class Audit:
    """What Python tells of files, sockets and programs while a reader runs.

    Attributes:
        seen: Event → its number.
        problems: What was outside.
    """

    def __init__(self, outside):
        self.inside = []  # the directories that may be opened
        self.outside = str(outside)
        # Modules and their data, and what says which process is alive.
        allowed = {
            sys.prefix,
            sys.base_prefix,
            str(ROOT),
            *map(os.path.realpath, sys.path),
            "/proc",
            "/usr",
            "/dev/null",
        }
        self.allowed = [path for path in allowed if path and path != "/"]
        self.is_on = False
        self.seen, self.problems = {}, []
        sys.addaudithook(self.hear)

    def hear(self, event, arguments):
        if not self.is_on:
            return
        kind = event.partition(".")[0]
        if kind in ("socket", "subprocess", "urllib") or event in (
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
        ):
            # git is asked about the program that is run, with the programs of a repository's config
            # switched off.
            is_git = (
                arguments
                and os.path.basename(str(arguments[0])) == "git"
                and "core.fsmonitor=false" in arguments[1]
            )
            # A pair of sockets within the process, which the event loops of Orbax have.
            is_pair = event == "socket.__new__" and arguments[1] == socket.AF_UNIX
            if event != "socket.gethostname" and not is_git and not is_pair:
                self.problems.append(f"{event}{arguments!r:.200}")
        elif event == "open" or (
            kind in ("os", "shutil") and arguments and isinstance(arguments[0], str | bytes)
        ):
            self.seen[event] = self.seen.get(event, 0) + 1
            if event == "os.symlink":
                self.check(event, os.fsdecode(arguments[1]))  # not what the link leads to
            elif isinstance(arguments[0], str | bytes) and event not in (
                "os.putenv",
                "os.unsetenv",
            ):
                self.check(event, os.fsdecode(arguments[0]))

    def check(self, event, path):
        self.is_on = False
        try:
            if event in ("os.remove", "os.rename", "os.symlink"):
                # The path of a link itself, not of what it leads to.
                real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            else:
                real = os.path.realpath(path)
        finally:
            self.is_on = True
        is_unnamed = real == tempfile.gettempdir()  # a file without a name, for the output of git
        # To list what is no directory opens nothing: it is an error.
        if event in ("os.listdir", "os.scandir") and not os.path.isdir(real):
            return
        # A name in a directory that is held open; the hook is not told in which. `search` looks for
        # new files.
        if not os.path.dirname(path) and not os.path.lexists(path):
            return
        # To flush the names in a directory, which may have become a link, reads and writes nothing.
        if event == "open" and real == self.outside and os.path.isdir(real):
            return
        if not is_unnamed and not any(
            f"{real}/".startswith(f"{place.rstrip('/')}/")
            for place in (*self.inside, *self.allowed)
        ):
            self.problems.append(f"{event}: {path}")


class Loader:
    """A loader with a position that is large enough to be a file."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return (jnp.ones(3),)

    def state_dict(self):
        return {
            "at": self.at,
            "buffer": np.arange(10_000.0),
            "rng": np.random.default_rng(0),
            "names": {1: (2, "a")},
        }

    def load_state_dict(self, state):
        self.at = state["at"]


optimizer = jstep.adam(0.1)
train_step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)


def train(run, last, *, swapping=None):
    evaluate = jstep.EvaluationHook(
        lambda state: {"loss": float(jnp.sum(state.params["w"]))},
        every_n_steps=2,
        callbacks=[jstep.KeepBest(f"{run}/best", "loss", mode="min")],
    )
    hooks = [
        evaluate,
        jstep.FingerprintHook(every_n_steps=2),
        jstep.History(every_n_steps=1, path=f"{run}/history.jsonl"),
    ]
    if swapping is not None:
        hooks.append(swapping)
    state = state_at_zero()
    options = {
        "checkpoint_dir": run,
        "logdir": f"{run}/logs",
        "config": {"lr": 0.1, "deep": {"a": [1, 2]}},
    }
    return jstep.train(
        train_step,
        state,
        Loader(),
        last,
        hooks=hooks,
        progress=False,
        save_checkpoint_steps=2,
        **options,
    )


def make(run):
    train(run, 4)
    (pathlib.Path(run) / "stalls").mkdir(exist_ok=True)
    start = json.loads(next(pathlib.Path(run, "starts").glob("model.000001.json")).read_bytes())
    stall = {
        "version": 1, "prefix": "model", "process": 0, "processes": 2, "pid": 5, "host": "h",
        "since": 1.7e9,
    }  # fmt: skip
    stall |= {
        "renewed": 1.7e9,
        "stall": True,
        "step": 3,
        "kind": "call",
        "what": "step 3",
        "line": "a.py:3",
        "exit_code": 75,
    }
    pathlib.Path(run, "stalls/model.0.json").write_text(json.dumps(stall))
    other = {
        "version": start["version"],
        "prefix": "model",
        "index": 1,
        "start": 1,
        "process": {"host": "h", "pid": 5},
    }
    other |= {
        "written": 1.7e9,
        "step": [0, 4],
        "seconds": {"stepping": 1.0},
        "batches": {},
        "signal": None,
    }
    pathlib.Path(run, "starts/model.1.json").write_text(json.dumps(other))
    jstep.save_weights(f"{run}/weights.safetensors", {"w": jnp.ones(3), "b": jnp.zeros((2, 2))})
    pathlib.Path(run, "shards").mkdir()
    jstep.save_weights(f"{run}/shards/one.safetensors", {"w": jnp.ones(3)})
    jstep.save_weights(f"{run}/shards/two.safetensors", {"b": jnp.zeros((2, 2))})
    weight_map = {"w": "one.safetensors", "b": "two.safetensors"}
    pathlib.Path(run, "shards/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


class Swap(jstep.Hook):
    """Somebody else who may write to the directory, and replaces something by a link while the run
    takes steps."""

    def __init__(self, run, outside, chosen):
        self.run, self.outside, self.chosen = pathlib.Path(run), outside, chosen

    def after_step(self, step, state, metrics):
        if step != 5:
            return
        # Not during a write, as links are looked for just before it: these files are written beside
        # the first steps.
        until = time.monotonic() + 10
        while len(list(self.run.glob("starts/*.programs"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        victims = sorted(path for path in self.run.rglob("*") if not path.is_symlink())
        victim = victims[int(self.chosen * len(victims))]
        is_directory = victim.is_dir()
        victim.rename(f"{victim}.aside")
        victim.symlink_to(self.outside if is_directory else self.outside / "secret")


# Mutants.


def nodes_of(value, path=()):
    yield path
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes_of(item, (*path, key))


def changed(value, draw):
    """Return JSON of which a node is another one: an odd value, one of elsewhere in it, none, or
    several times."""
    paths = list(nodes_of(value))
    path = draw.choice(paths)
    if not path:
        return draw.odd()
    above = value
    for key in path[:-1]:
        above = above[key]
    kind = draw.randrange(9)
    if kind == 0:
        del above[path[-1]]
    elif kind == 1:
        other = value
        for key in draw.choice(paths):
            other = other[key]
        above[path[-1]] = json.loads(json.dumps(other))
    elif kind == 2 and isinstance(above, list):
        above[path[-1] : path[-1] + 1] = [above[path[-1]]] * draw.choice([2, 300])
    elif kind == 2:
        moved = above[path[-1]]
        above[draw.choice([*filter(lambda key: isinstance(key, str), ODD), CONTROL])] = moved
    elif kind == 3 and isinstance(above[path[-1]], str):
        above[path[-1]] = with_control(above[path[-1]])
    elif kind == 4:
        # Everywhere, so that what has names in two places still agrees.
        old = above[path[-1]] if isinstance(above[path[-1]], str) else path[-1]
        return renamed(value, old, with_control(old)) if isinstance(old, str) else value
    else:
        above[path[-1]] = draw.odd()
    return value


def with_control(name):
    return name[: len(name) // 2] + CONTROL + name[len(name) // 2 :]


def renamed(value, old, new):
    if isinstance(value, dict):
        return {new if key == old else key: renamed(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, old, new) for item in value]
    return new if value == old else value


def change_json(path, draw):
    path.write_text(json.dumps(changed(json.loads(path.read_bytes()), draw)))


def change_manifest(path, draw):
    value = json.loads(path.read_bytes())
    del value["crc32"]
    if draw.random() < 0.3:
        value["extra"] = changed(value["extra"], draw)
    else:
        value = changed(value, draw)
    if draw.random() < 0.5 and isinstance(value, dict):
        value["files"] = {}  # otherwise their sizes show most changes of them
    text = json.dumps(value).rstrip("}") if isinstance(value, dict) else json.dumps(value)
    body = text.encode(errors="surrogatepass")
    path.write_bytes(body + b',\n "crc32": "' + f'{zlib.crc32(body):08x}"\n}}\n'.encode())


def change_lines(path, draw):
    lines = path.read_bytes().splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), draw)).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def change_bytes(data, draw):
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(data)) if data else 0
        kind = draw.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            data[at : at + draw.randrange(1, 9)] = b""
        elif kind == 2:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        else:
            data[at : at + 1] = databases.number(
                draw.choice([0, 1, 127, 128, 2**20, 2**40, 2**63, 2**64 - 1])
            )
    return bytes(data)


def change_database(path, draw):
    """A node, or the manifest, with other content and a right checksum."""
    root = path / "manifest.ocdbt"
    (data,) = (file for file in (path / "d").iterdir() if len(file.name) == 32)
    if draw.random() < 0.3:
        old = root.read_bytes()
        root.write_bytes(databases.sealed(0x0CDB3A2A, change_bytes(old[12:-4], draw)))
        return
    content = data.read_bytes()
    start = content.rindex(b"\x0c\xdb\x20\xde")
    node = databases.sealed(0x0CDB20DE, change_bytes(content[start + 12 : -4], draw))
    made = {
        0: lambda put: (0, *put(node)),
        1: lambda put: (
            1,
            *put(databases.interior(1, [(b"a", 1, *put(node)), (b"b", 1, *put(node))])),
        ),
        2: lambda put: (
            1,
            *put(databases.interior(1, [(b"a", 0, *put(node)), (b"b", 0, *put(node))])),
        ),
    }[draw.randrange(3)]
    databases.put(path, lambda put: (put(content[:start]), made(put))[1])


def change_events(path, draw):
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    at = draw.randrange(len(records))
    if draw.random() < 0.8:
        records[at] = change_bytes(records[at], draw)
    else:
        records[at] = b"\0" * draw.choice([0, 1, 10**6])
    text = b"".join(map(frame, records))
    claim = struct.pack("<Q", draw.choice([2**31 - 1, 2**40, 2**63]))
    path.write_bytes(text + (frame(claim)[12:20] + b"xxxx" if draw.random() < 0.1 else b""))


def change_weights(path, draw):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(changed(json.loads(data[8 : 8 + size]), draw)).encode(
        errors="surrogatepass"
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def change_kind(path, draw, outside):
    """Something else of the same name."""
    is_directory = path.is_dir()
    kind = draw.randrange(9)
    other = path.with_name(with_control(path.name))
    if kind == 6:
        path.rename(other)
        return
    if kind == 7:
        os.mkfifo(other)
        return
    if kind == 8:
        shutil.copytree(path, other) if is_directory else shutil.copy(path, other)
        return
    shutil.rmtree(path) if is_directory else path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        # Not a directory elsewhere: a search for runs follows links to directories, and so may a
        # checkpoint be one.
        path.symlink_to(path.parent if is_directory else outside / "secret")
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(path.name)
    else:
        path.write_bytes(bytes(draw.choice([0, 1, 5000])))


# Readers.

FEW = (OSError, ValueError, jstep.CheckpointError)


def command(*words):
    def call(run):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli.main([word.replace("RUN", run) for word in words])
        if odd := control_in(out.getvalue()):
            raise AssertionError(f"prints {odd}")

    return call


def check_shown(found):
    if odd := control_in(str(found)):
        raise AssertionError(f"shows {odd}")


def control_in(text):
    """Return the first control characters of a text and what is around them; "" if it has none but
    our line breaks."""
    found = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\nforged", text)
    return repr(text[max(0, found.start() - 100) : found.end() + 20]) if found else ""


def restore(run):
    with jstep.Saver(run) as saver:
        saver.restore(None)
        saver.extra()


def state_at_zero():
    return jstep.TrainState.create({"w": jnp.zeros(3), "v": jnp.zeros(2000)}, optimizer)


def restore_state(run):
    with jstep.Saver(run) as saver:
        saver.restore(state_at_zero(), partial=True)
        saver.restore(state_at_zero())


def restore_best(run):
    with jstep.Saver(f"{run}/best") as saver:
        saver.restore(state_at_zero(), step=saver.best_step())


def restore_missing(run):
    with jstep.Saver(run, "other") as saver:
        saver.restore(None)


def weights_of_checkpoint(run):
    jstep.load_weights(f"{run}/model-4", {"w": np.zeros(3, np.float32)}, partial=True)


TARGET = {"w": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)}
CHECKPOINT = [
    restore,
    restore_state,
    restore_best,
    restore_missing,
    lambda run: jstep.load_weights(f"{run}/model-4", TARGET),
    weights_of_checkpoint,
    command("inspect", "RUN/model-4"),
    command("inspect", "RUN/model-4", "--verify"),
]
CHECKPOINT += [
    command("inspect", "RUN"),
    command("diff", "RUN/model-2", "RUN/model-4"),
    lambda run: jstep.runs(run),
]
RECORD = [
    command("runs", "RUN"),
    command("runs", "RUN", "--starts"),
    command("goodput", "RUN"),
    command("stalls", "RUN"),
]
RECORD += [lambda run: jstep.goodput(run), lambda run: check_shown(jstep.runs(run))]
RECORD += [
    command("diff", "RUN"),
    command("report", "RUN", "-o", "RUN/page.html"),
    command("runs", "RUN", "--json"),
]
LOGS = [lambda run: list(jstep.summary.summary_iterator(f"{run}/logs"))]
LOGS += [command("events", "RUN"), command("report", "RUN", "-o", "RUN/page.html")]
LINES = [
    lambda run: jstep.History.read(f"{run}/history.jsonl"),
    lambda run: read_log(f"{run}/logs/fingerprints.jsonl"),
]
LINES += [command("diff", "RUN/logs/fingerprints.jsonl", "RUN/logs/fingerprints.jsonl")]
WEIGHTS = [lambda run: jstep.load_weights(f"{run}/weights.safetensors", TARGET, partial=True)]
WEIGHTS += [
    lambda run: jstep.load_weights(f"{run}/shards", TARGET),
    lambda run: jstep.load_weights(run, TARGET),
]


def start_again(run):
    train(run, 6)


def start_and_swap(run, outside, chosen):
    train(run, 8, swapping=Swap(run, outside, chosen))


def mutate(run, draw, outside):
    """Change a file of a run; return what was changed, and its readers."""
    run = pathlib.Path(run)
    kind = draw.choice(
        [
            *(
                "manifest", "manifest", "database", "database", "record", "record", "events",
                "lines", "weights", "kind",
            ),
            *(["link in mid-run"] if draw.random() < 0.2 else []),
        ]
    )  # fmt: skip
    if kind == "manifest":
        change_manifest(run / "model-4/manifest.json", draw)
        return kind, CHECKPOINT
    if kind == "database":
        change_manifest_files(run / "model-4/manifest.json")
        change_database(run / "model-4", draw)
        return kind, CHECKPOINT
    if kind == "record":
        files = sorted([*run.glob("starts/*.json"), *run.glob("stalls/*.json")])
        change_json(draw.choice(files), draw)
        return kind, RECORD
    if kind == "events":
        change_events(draw.choice(sorted(run.glob("logs/events*"))), draw)
        return kind, LOGS
    if kind == "lines":
        change_lines(draw.choice([run / "history.jsonl", run / "logs/fingerprints.jsonl"]), draw)
        return kind, LINES
    if kind == "weights":
        path = run / draw.choice(
            ["weights.safetensors", "shards/one.safetensors", "shards/model.safetensors.index.json"]
        )
        change_json(path, draw) if path.suffix == ".json" else change_weights(path, draw)
        return kind, WEIGHTS
    if kind == "link in mid-run":
        return kind, [functools.partial(start_and_swap, outside=outside, chosen=draw.random())]
    # Files of weights and their index may be links, as those of the Hugging Face Hub are.
    left_out = {run / "page.html", run / "weights.safetensors", *run.glob("shards/*")}
    victims = sorted(
        path for path in run.rglob("*") if not path.is_symlink() and path not in left_out
    )
    victim = draw.choice(victims)
    change_kind(victim, draw, outside)
    readers = [*CHECKPOINT, *RECORD, *LOGS, *WEIGHTS]
    # A path that the reader is given is its user's, and may be a link.
    if victim.name in ("history.jsonl", "fingerprints.jsonl"):
        return kind, readers
    return kind, [*readers, *LINES]


def change_manifest_files(path):
    value = json.loads(path.read_bytes())
    del value["crc32"]
    body = json.dumps(value | {"files": {}}).rstrip("}").encode()
    path.write_bytes(body + b',\n "crc32": "' + f'{zlib.crc32(body):08x}"\n}}\n'.encode())


class TookTooLongError(BaseException):
    """A reader took more than its seconds."""


def time_is_over(*_):
    raise TookTooLongError


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class Ears(logging.Handler):
    """Collects what jstep logs."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def called(reader, run, audit, ears):
    """Call a reader, and return what is wrong."""
    before, problems = peak(), len(audit.problems)
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    audit.is_on = True
    wrong, texts = [], []
    ears.lines.clear()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            reader(run)
    except (*FEW, ImportError) as error:
        texts += traceback.format_exception(error)  # with its notes and causes
    except TookTooLongError:
        wrong.append(f"more than {10 * SECONDS} seconds by the clock")
    except Exception as error:
        texts += traceback.format_exception(error)
        wrong.append("".join(traceback.format_exception(error)[-3:]))
    finally:
        audit.is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.process_time() - began > SECONDS:
        wrong.append(f"more than {SECONDS} seconds of CPU")
    wrong += audit.problems[problems:]
    if peak() - before > MEGABYTES:
        wrong.append(f"{peak() - before} MB")
    texts += [*ears.lines, *(str(warning.message) for warning in warned)]
    wrong += [f"control characters in {odd}" for odd in map(control_in, texts) if odd]
    return wrong


class Stage:
    """The directories of a mutant, its neighbours, and what is elsewhere.

    work/run    where the run was made: the reader's own, or one that somebody else has put there
    work/copy   a copy beside it
    own/run     another run of the reader's, of which work/run may be a copy
    outside     what nobody may open or change
    """

    def __init__(self, above):
        self.above = above
        self.run, self.copy, self.own = (
            f"{above}/work/run",
            f"{above}/work/copy",
            f"{above}/own/run",
        )
        self.outside = pathlib.Path(above, "outside")
        self.outside.mkdir()
        (self.outside / "secret").write_text('{"secret": 1}')
        self.made = {self.run: f"{above}/made/run", self.own: f"{above}/made/own"}
        for run, made in self.made.items():
            # Made at the paths of all mutants, or they would all be copies.
            make(run)
            shutil.copytree(run, made)
        self.untouched = self.elsewhere()

    def elsewhere(self):
        """Return what is elsewhere, to see whether it was changed."""
        found = {}
        for path in sorted(pathlib.Path(self.above).rglob("*")):
            name = str(path.relative_to(self.above))
            if not name.startswith("work/"):
                details = path.lstat()
                found[name] = (details.st_size, details.st_mtime_ns) if path.is_file() else None
        return found

    def set(self, place, draw):
        """Make the directories of a mutant; return the directory that is changed, and those that
        readers may open."""
        shutil.rmtree(f"{self.above}/work")
        original = self.run if place in ("own", "beside") else self.own
        shutil.copytree(self.made[original], self.run)
        draw.elsewhere = (
            str(self.outside), "outside", "../outside", self.own, "own/run", "work/run",
            "work/copy",
        )  # fmt: skip
        if place == "own":
            draw.elsewhere = ()  # its record may lead anywhere
        if place == "beside":
            shutil.copytree(self.run, self.copy)
            return self.copy, [f"{self.above}/work"]
        if place == "of another host":
            host = json.dumps(socket.gethostname()).encode()
            for path in [
                *pathlib.Path(self.run).glob("starts/*.json"),
                *pathlib.Path(self.run).glob("stalls/*.json"),
            ]:
                path.write_bytes(
                    path.read_bytes().replace(b'"host": ' + host, b'"host": "stranger"')
                )
        return self.run, [f"{self.above}/work", *([self.own] if place == "copy" else [])]


def search(seconds, count, seed):
    signal.signal(signal.SIGALRM, time_is_over)
    draw = Draw(seed)
    ears = Ears()
    logging.getLogger("jstep").addHandler(ears)
    with tempfile.TemporaryDirectory() as above:
        above = os.path.realpath(above)
        os.chdir(above)  # so that relative paths of records lead to something
        stage = Stage(above)
        audit = Audit(stage.outside)
        run, audit.inside = stage.set("own", draw)
        for reader in (*CHECKPOINT, *RECORD, *LOGS, *LINES, *WEIGHTS, start_again):
            if wrong := called(reader, run, audit, ears):  # it also imports what readers import
                raise SystemExit(f"without a mutation: {wrong}")
        until, calls, number, kinds, places, defects = time.monotonic() + seconds, 0, 0, {}, {}, []
        while number < count and time.monotonic() < until and len(defects) < MAX_DEFECTS:
            number += 1
            place = draw.choice(PLACES)
            run, audit.inside = stage.set(place, draw)
            kind, readers = mutate(run, draw, stage.outside)
            kinds[kind] = kinds.get(kind, 0) + 1
            places[place] = places.get(place, 0) + 1
            if kind in ("kind", "record", "lines") and number % 40 == 0:
                readers = [start_again]
            elif len(readers) > 2:
                readers = draw.sample(readers, 2)
            # All runs of a folder are read where the mutant is one of them.
            folder = run
            if place == "beside" and kind == "record" and draw.random() < 0.7:
                folder = f"{above}/work"
            for reader in readers:
                calls += 1
                wrong = called(reader, folder, audit, ears)
                found = stage.elsewhere()
                if found != stage.untouched:
                    wrong.append(f"changed {sorted(dict(found.items() ^ stage.untouched.items()))}")
                    stage.untouched = found
                if wrong:
                    defects.append(
                        f"mutant {number} ({kind}, {place}), {name_of(reader)}: {'; '.join(wrong)}"
                    )
                    print(defects[-1], file=sys.stderr, flush=True)
        heard = ", ".join(f"{event} {times}" for event, times in sorted(audit.seen.items()))
        print(f"seed {seed}: {number} mutants ({kinds}; {places}), {calls} calls, peak {peak()} MB")
        print(
            f"{len(defects)} defects; the audit hook heard {heard}; outside: {len(audit.problems)}"
        )
        return defects


def name_of(reader):
    closure = getattr(reader, "__closure__", None) or ()
    words = [cell.cell_contents for cell in closure]
    return f"{getattr(reader, '__name__', reader)} {words}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10**9, help="the number of mutants")
    parser.add_argument(
        "--seconds",
        type=float,
        default=None,
        help="for so long; by default a minute without --count",
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the generator of mutants"
    )
    given = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("jstep").setLevel(logging.INFO)
    logging.getLogger("jstep").propagate = False
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    limit = given.seconds or (60 if given.count == 10**9 else float("inf"))
    raise SystemExit(1 if search(limit, given.count, given.seed) else 0)
