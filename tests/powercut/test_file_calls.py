"""The recorder of file calls: nothing that changes a file is missed, and each kind of call can be made to fail."""

import json
import os

import file_calls
import pytest
from disk_states import PREFIX, History, tree_of
from file_calls import Kind

PROGRAM = """
import contextlib, errno, json, os, shutil, subprocess, sys, tempfile, threading
from file_calls import Kind, failing, mark, recording

above = sys.argv[1]
disk = os.path.join(above, "disk")
os.mkdir(disk)
with open(disk + "/older", "w") as file:
    file.write("older")

def use_all_calls():
    os.makedirs("a/b")
    with open("a/b/file", "wb", buffering=0) as file:
        file.write(b"0123456789")
        os.pwrite(file.fileno(), b"abc", 4)
        os.writev(file.fileno(), [b"x", b"", b"yz"])
        file.seek(20)
        file.write(b"after a hole")
        os.ftruncate(file.fileno(), 25)
        mark("before the flush")
        os.fsync(file)
    with open("a/b/file", "ab") as file:
        file.write(b"appended")
    shutil.copyfile("a/b/file", "copied")
    os.link("copied", "linked")
    os.rename("copied", "a/moved")
    os.rename("a/b", "c")
    folder = os.open("a", os.O_RDONLY)
    handle = os.open("relative", os.O_RDWR | os.O_CREAT, dir_fd=folder)
    os.write(os.dup(handle), b"through another descriptor")
    os.rename("relative", "renamed", src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
    with open("older", "r+") as file:
        file.write("OL")
    open("emptied", "w").write("x")
    open("emptied", "w").close()
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(b"without a name")
    for name in "de":
        os.makedirs(f"removed/{name}")
        open(f"removed/{name}/file", "w").write("x")
    shutil.rmtree("removed")
    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    subprocess.run(["touch", above + "/elsewhere"], check=True)

def write(number):
    for i in range(50):
        with open("of all threads", "ab", buffering=0) as file:
            file.write(b"%d" % number)
        with contextlib.suppress(FileNotFoundError):
            os.rename("of all threads", "of all threads again")

os.chdir(disk)
with recording(disk, above + "/log"):
    mark("start")
    use_all_calls()
open(disk + "/later", "w").close()
os.remove(disk + "/later")

ATTEMPTS = {
    "CREATE": lambda: open("new", "w").close(), "WRITE": lambda: open("older", "ab", 0).write(b"x"),
    "TRUNCATE": lambda: os.truncate(os.open("older", os.O_RDWR), 1), "SYNC": lambda: os.fdatasync(os.open(".", 0)),
    "MKDIR": lambda: os.mkdir("new"), "RMDIR": lambda: os.rmdir("a"), "UNLINK": lambda: os.remove("older"),
    "RENAME": lambda: os.rename("older", "new"), "LINK": lambda: os.link("older", "new"),
    "OPEN": lambda: open("older").close(), "CLOSE": lambda: os.close(os.open("older", os.O_RDWR)),
}
found = {}
with recording(disk):
    for name, attempt in ATTEMPTS.items():
        with failing(1, errno.ESTALE, kinds={Kind[name]}) as failure:
            try:
                attempt()
                found[name] = "nothing failed"
            except OSError as error:
                found[name] = errno.errorcode[error.errno]
        found[name] += " " + failure.call
    with failing(2, errno.EIO, kinds={Kind.CREATE}, end="/new", lasts=True) as failure:
        for i in range(4):
            open("other", "w").close()
            try:
                open("new", "w").close()
                os.remove("new")
                found[i] = ""
            except OSError as error:
                found[i] = errno.errorcode[error.errno]
    open("new", "w").close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def recorded(recorder, tmp_path_factory):
    above = os.path.realpath(tmp_path_factory.mktemp("calls"))
    out = file_calls.python(PROGRAM, above)
    return above, json.loads(out)


def test_a_record_leads_to_the_bytes_on_the_disk(recorded):
    above, _ = recorded
    history = History(file_calls.read(f"{above}/log"))
    final, disk = dict(history.final()), dict(tree_of(f"{above}/disk"))
    for name in ("new", "other"):  # of the calls that fail, later
        del disk[name]
    assert final == disk
    assert final["c/file"] == b"0123456789abc"[:4] + b"abc789xyz"[:6] + b"xyz" + bytes(7) + b"after" + b"appended"
    assert len(final["of all threads again"]) + len(final.get("of all threads", b"")) > 0
    assert history.marks[0][1] == "start"
    assert next(state.tree for state in history.states(PREFIX)) == {"older": b"older"}


def test_each_kind_of_call_fails(recorded):
    above, found = recorded
    kinds = {kind.name for kind in Kind} - {"MARK"}
    assert {name: text.split()[:2] for name, text in found.items() if name in kinds} == {
        name: ["ESTALE", name] for name in kinds
    }
    assert [found[str(i)] for i in range(4)] == ["", "EIO", "EIO", "EIO"]
    assert found["SYNC"] == f"ESTALE SYNC {above}/disk"
