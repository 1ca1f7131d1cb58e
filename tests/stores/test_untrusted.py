"""What somebody else wrote: paths, links, sizes, numbers and keys, and that each reader asks
`stores/untrusted.py`."""

import ast
import os
import socket

import pytest
from source_files import MODULES, nodes_of, text_of

from jstep.stores import tagged_json
from jstep.stores.files import ForeignFileError, check_no_links, open_regular
from jstep.stores.untrusted import (
    Extents,
    RecordedRun,
    UntrustedError,
    check_keys,
    decode_json,
    is_below_or_beside,
    is_database_file,
    is_seconds,
    is_step,
    link_below,
    regular_files,
    step_in,
)

HERE = socket.gethostname()
LARGE_PRIME = 2**61 - 1
"""The modulus of Python's hashes of numbers."""


# Paths.


@pytest.mark.parametrize(
    ("path", "where", "expected"),
    [
        ("/runs/a/logs", "/runs/a", True),
        ("/runs/b", "/runs/a", True),
        ("/runs/a/../../etc", "/runs/a", False),
        ("/runs2/b", "/runs/a", False),
        ("/elsewhere", "/runs/a", False),
        ("/elsewhere", "/a", False),
        ("/a/logs", "/a", True),
        ("/ab", "/a", False),
        ("s3://bucket/runs/b", "s3://bucket/runs/a", True),
        ("s3://bucket/runs2/b", "s3://bucket/runs/a", False),
        ("s3://other/runs/a", "s3://bucket/runs/a", False),
        ("gs://bucket/runs/b", "s3://bucket/runs/a", False),
        ("s3://bucket/runs/../../other/x", "s3://bucket/runs/a", False),
        ("s3://bucket/runs/./b", "s3://bucket/runs/a", False),
        ("s3://bucket.other/runs/b", "s3://bucket/a", False),
        ("S3://bucket/runs/b", "s3://bucket/runs/a", False),
        ("file:///runs/b", "/runs/a", False),
        ("", "/runs/a", False),
        ("s3://bucket/runs/a", "/runs/a", False),
        ("/runs/a", "s3://bucket/runs/a", False),
    ],
)
def test_what_is_below_a_run_or_beside_it(path, where, expected):
    assert is_below_or_beside(path, where) == expected


def test_a_link_that_leads_away_is_not_beside(tmp_path):
    for name in ("runs/a", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/b").symlink_to(tmp_path / "elsewhere")
    assert not is_below_or_beside(str(tmp_path / "runs/b/logs"), str(tmp_path / "runs/a"))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert is_below_or_beside(str(tmp_path / "link/c"), str(tmp_path / "link/a"))
    assert is_below_or_beside(str(tmp_path / "runs/c"), str(tmp_path / "link/a"))


def test_paths_elsewhere_are_opened_by_who_recorded_them(tmp_path):
    where = str(tmp_path / "runs/a")
    for path in ("/elsewhere/logs", "s3://bucket/logs"):
        assert RecordedRun(where, where, {HERE}).find(path) == path
        assert RecordedRun(where, where, {"another"}).find(path) is None
        assert RecordedRun(where, where, {HERE, "another"}).find(path) is None
        assert RecordedRun(where, where, set()).find(path) is None
        assert RecordedRun(where, "/was/runs/a", {HERE}).find(path) is None
        assert RecordedRun(where, None, {HERE}).find(path) is None
        # Hosts are compared as they are.
        assert RecordedRun(where, where, {f"{HERE}."}).find(path) is None
        assert RecordedRun(where, where, {HERE.upper() + "-"}).find(path) is None
        assert RecordedRun(where, where, {None}).find(path) is None
    assert RecordedRun(where, "/was/runs/a", {"another"}).find("") is None
    assert RecordedRun(where, "", {"another"}).find("/elsewhere") is None
    assert RecordedRun(where, "/was/runs/a", {"another"}).find("/was/runs/b/model-3") == str(
        tmp_path / "runs/b/model-3"
    )


@pytest.mark.parametrize("is_linked_above", [False, True])
def test_a_link_below_the_directory_of_a_run(tmp_path, is_linked_above):
    (tmp_path / "real/run/inner").mkdir(parents=True)
    (tmp_path / "real/mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real/run")
    run = str(tmp_path / ("link" if is_linked_above else "real/run"))
    (tmp_path / "real/run/best").symlink_to("../mine")
    (tmp_path / "real/run/inner/again").symlink_to("..")
    for given in (run, str(tmp_path / "real/run")):
        assert link_below(f"{given}/best/best-4", run) == f"{given}/best"
        assert link_below(f"{given}/inner/again", run) == f"{given}/inner/again"
        assert link_below(f"{given}/inner/logs", run) is None
    assert link_below(str(tmp_path / "real/mine"), run) is None
    assert link_below(run, run) is None
    with pytest.raises(
        ForeignFileError,
        match=r"best: is a link below .* nothing is written through it",
    ):
        check_no_links(f"{run}/best", run)


# Sizes.


def test_files_count_once_and_only_those_that_are_read(tmp_path):
    (tmp_path / "d").mkdir()
    data = tmp_path / "d" / ("0" * 32)
    data.write_bytes(bytes(100))
    os.link(data, tmp_path / "d" / ("1" * 32))  # as a backup makes them
    (tmp_path / "d/sparse").write_bytes(bytes(1000))
    (tmp_path / "NOTES").write_text("a user's")
    found = regular_files(str(tmp_path), is_database_file)
    assert found.nbytes == 100
    assert sorted(found.sizes) == [f"d/{'0' * 32}", f"d/{'1' * 32}"]
    (tmp_path / "d" / ("2" * 32)).symlink_to(data)
    with pytest.raises(UntrustedError, match="2 is not a regular file"):
        regular_files(str(tmp_path), is_database_file)


def test_ranges_that_meet_and_ranges_that_overlap():
    extents = Extents()
    for start, length in ((10, 5), (0, 10), (15, 0), (15, 1)):
        extents.add("a", start, length)
    extents.add("b", 3, 9)
    extents.check()
    extents.add("a", 14, 1)
    with pytest.raises(UntrustedError, match="'a' is named more than once"):
        extents.check()


def test_links_are_followed_only_on_demand(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    with open_regular(str(tmp_path / "link")) as file:
        assert file.read() == b"1"
    with pytest.raises(OSError, match="is a link, not a regular file"):
        open_regular(str(tmp_path / "link"), follow_link=False)


# Numbers, and keys.


def test_numbers_that_a_step_and_a_time_can_have():
    values = (0, 2**63 - 1, 2**63, -1, True, 1.0, "1")
    assert [is_step(value) for value in values] == [True, True] + [False] * 5
    values = (0, 3e9, 1e308, 10**400, -1, float("nan"))
    assert [is_seconds(value) for value in values] == [True, True] + [False] * 4
    assert [step_in(text) for text in ("7", "9" * 18, "9" * 19, "9" * 5000)] == [
        7,
        10**18 - 1,
        None,
        None,
    ]


def test_keys_with_one_hash():
    check_keys(range(10**5))
    check_keys([2.0**n for n in range(-1000, 1000)])  # those of 33 are equal
    check_keys([(n, str(n)) for n in range(1000)])
    with pytest.raises(UntrustedError, match="1000 keys have one hash"):
        check_keys(n * LARGE_PRIME for n in range(1000))
    for tag in ("$dict", "$ordered_dict"):
        with pytest.raises(ValueError, match="keys have one hash"):
            tagged_json.decode({tag: [[n * LARGE_PRIME, 0] for n in range(1000)]})


def test_an_entropy_that_would_take_quadratic_time():
    seed = {
        "entropy": {"$int": "f" * 10**6},
        "spawn_key": [],
        "pool_size": 4,
        "n_children_spawned": 0,
    }
    for change in (
        {},
        {"entropy": 1, "spawn_key": [{"$int": "f" * 10**6}]},
        {"entropy": [1] * 10**5},
    ):
        with pytest.raises(ValueError, match="at most 65536 bits"):
            tagged_json.decode({"$seed_sequence": seed | change})


def test_a_file_that_a_position_names_twice():
    files = tagged_json.FilesOnce(lambda name: name.encode())
    encoded = [{"$bytes": {"$file": "a"}}, {"$bytes": {"$file": "b"}}]
    assert tagged_json.decode(tagged_json.resolve_files(encoded, files)) == [b"a", b"b"]
    with pytest.raises(UntrustedError, match="the file 'a' is named more than once"):
        tagged_json.resolve_files(encoded[:1], files)


def test_json_of_no_use():
    assert decode_json(b"[" * 10**5 + b"]" * 10**5) is None
    assert decode_json(b"9" * 10**5) is None
    assert decode_json(b'{"a": [1, 2]}') == {"a": [1, 2]}


# The readers.

DECODES = {
    "stores.untrusted": "`decode_json`, which the others use",
    "array_store.manifest": "a copy of what a user passed",
    "checkpoint.finding": "what the first process of this run sent",
    "checkpoint.shared_directory": "what other processes of this run sent",
    "core.processes": "what other processes of this run sent",
    "data.positions": "what other processes of this run sent",
    "evaluating.evaluation_hook": "what the first process of this run sent",
    "origin.agreement": "what other processes of this run sent",
    "logs.fingerprint_log": "a line, whose fields `parse_line` checks",
    "logs.history_file": "a line, which must be as it is written",
    "weights.search": "an index, whose names are checked",
    "watching.recorder": "a lineage of process 0",
    "weights.tensors": "a header that the safetensors package has checked",
}
"""The modules that decode JSON by themselves, and which."""
WALKS = {
    "stores.untrusted": "`regular_files`, which follows no link",
    "stores.files": "`walk`: the names of event files",
    "array_store.attempts": "a directory that this process has written",
    "planning.topologies": "the installed compilers of CUDA",
    "look.runs": "follows links last, and each directory once",
}
"""The modules that go through the directories below another one."""
NUMBERS = {
    "array_store.listing": "the time in the name of an attempt, of 15 digits at most",
    "array_store.manifest": "the bits in the name of a dtype, of three digits at most",
    "stores.growing_files": "the number of a part",
    "stores.objects": "the status of a response",
}


def callers_of(names):
    found = {}
    for module, path in MODULES.items():
        if not any(name.rpartition(".")[2] in text_of(path) for name in names):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                found.setdefault(module, []).append(ast.unparse(node))
    return found


def test_json_of_others_is_decoded_by_the_function_that_bounds_it():
    assert callers_of({"json.loads", "json.load", "orjson.loads"}).keys() <= DECODES.keys()


def test_directories_of_others_are_walked_by_the_function_that_follows_no_link():
    assert (
        callers_of({"os.walk", "os.scandir", "glob.glob", "shutil.copytree"}).keys() <= WALKS.keys()
    )


def test_steps_in_names_are_read_by_the_function_that_bounds_them():
    calls = callers_of({"int"})
    readers = {
        module
        for module in calls
        if module.partition(".")[0] in ("checkpoint", "look", "record", "stores")
    }
    of_names = {
        module
        for module in readers
        if any("match[" in call or "partition(" in call for call in calls[module])
    }
    assert of_names - {"stores.owners", "record.starts", "record.stall_files"} <= NUMBERS.keys()


def test_nothing_is_unpickled():
    loaders = {"pickle.loads", "pickle.load", "pickle.Unpickler", "torch.load", "joblib.load"}
    assert not callers_of(loaders | {"np.load", "numpy.load", "jnp.load"}), (
        "`allow_pickle` runs programs, too"
    )


def test_programs_and_sockets_have_one_place_each():
    programs = callers_of(
        {"subprocess.run", "subprocess.Popen", "os.system", "os.execv", "eval", "exec"}
    )
    assert programs.keys() <= {"record.code"}, (
        "git, which `record/code.py` asks with the programs of a config off"
    )
    sockets = callers_of({"socket.create_connection", "socket.socket", "urllib.request.urlopen"})
    assert sockets.keys() <= {"distributed.launcher"}, "the coordinator of several processes"
