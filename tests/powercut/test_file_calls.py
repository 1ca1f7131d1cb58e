"""Each kind of file call can be made to fail; `disk_states.complete` checks that a record misses none."""

import json
import os

import file_calls
from file_calls import Kind

PROGRAM = """
import errno, json, os, sys
from file_calls import Kind, failing, recording

above = sys.argv[1]
disk = os.path.join(above, "disk")
os.mkdir(disk)
with open(disk + "/older", "w") as file:
    file.write("older")

os.chdir(disk)
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


def test_each_kind_of_call_fails(recorder, tmp_path):
    above = os.path.realpath(tmp_path)
    found = json.loads(file_calls.python(PROGRAM, above))
    kinds = {kind.name for kind in Kind} - {"MARK"}
    assert {name: text.split()[:2] for name, text in found.items() if name in kinds} == {
        name: ["ESTALE", name] for name in kinds
    }
    assert [found[str(i)] for i in range(4)] == ["", "EIO", "EIO", "EIO"]
    assert found["SYNC"] == f"ESTALE SYNC {above}/disk"
