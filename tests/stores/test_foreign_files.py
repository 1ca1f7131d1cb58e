"""Files with a name of jstep's that somebody else made are never written, and what is no regular
file is not read."""

import errno
import os
import re
import stat
import subprocess
import sys

import pytest
from foreign_files import KINDS, TEXT, contents, put

from jstep.stores import growing_files, owners
from jstep.stores.files import (
    ForeignFileError,
    open_for_reading,
    open_own,
    open_regular,
    read_small,
    replace_file,
    write_named,
)

BEGINNING = b'{"kind": '
LINE = b'{"kind": "start"}\n'


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("append", [True, False])
def test_a_file_of_somebody_else_is_not_opened(tmp_path, kind, append):
    path = tmp_path / "run" / "own"
    victims = put(kind, path, tmp_path / "victims")
    before = contents(path), contents(victims)
    with pytest.raises(
        ForeignFileError,
        match=f"^{re.escape(str(path))}: jstep writes a file of this name, but it ",
    ):
        open_own(str(path), BEGINNING, append=append)
    assert (contents(path), contents(victims)) == before


@pytest.fixture
def umask():
    """A function that sets the umask until the end of the test."""
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(
    "data",
    [
        b"", bytes(9000), BEGINNING[:3], LINE, LINE[:-1] + bytes(100), bytes(300) + LINE,
        b'{"kind": \xff\n',
    ],
)  # fmt: skip
def test_own_files_are_opened(tmp_path, data):
    """Empty, NULs as after a power cut, torn, whole, or whole after NULs; folders on the way may be
    links."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = tmp_path / "link" / "own"
    path.write_bytes(data)
    with open_own(str(path), BEGINNING) as file:
        file.write(b"end")
    assert path.read_bytes() == data + b"end"
    with open_own(str(tmp_path / "new"), BEGINNING, append=False) as file:
        file.write(b"new")
    assert (tmp_path / "new").read_bytes() == b"new"


def test_a_link_that_appears_before_the_file_is_opened(tmp_path, monkeypatch):
    """The name is looked at, and then opened; both see a link or a FIFO."""
    real, (victim, path) = os.open, (tmp_path / "victim", tmp_path / "own")
    victim.write_bytes(LINE)
    makers = (lambda: path.symlink_to(victim), lambda: os.mkfifo(path))
    for make in makers:

        def opening(*args, make=make):
            if not os.path.lexists(path):
                make()
            return real(*args)

        monkeypatch.setattr(os, "open", opening)
        with pytest.raises((ForeignFileError, OSError), match=r"regular|symbolic links|seek"):
            open_own(str(path), BEGINNING)
        path.unlink()
    assert victim.read_bytes() == LINE


def test_lines_of_another_program_are_left_alone(tmp_path):
    """Also if they begin as those of jstep do."""
    path = tmp_path / "lines"
    put("other_json", path, tmp_path / "victims")
    before = contents(path)
    with pytest.raises(ForeignFileError, match="but it begins with b"):
        growing_files.append_to(str(path), lambda line: b"kind" in line)
    assert contents(path) == before


def test_a_log_that_is_too_large_is_not_read_into_memory(tmp_path):
    path = tmp_path / "lines"
    with open(path, "wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(2**40)  # it takes no space
    assert [len(tail.lines) for tail in growing_files.read_tail(str(path))] == [0]
    lines = growing_files.append_to(str(path), bool)
    lines.write(b'{"step": 2}\n')
    lines.close()
    assert path.read_bytes() == b'{"step": 2}\n'
    assert (tmp_path / "lines.1").stat().st_size == 2**40


def test_a_full_log_is_renamed_only_where_it_was_opened(tmp_path):
    """Whoever may write to a directory above it can put a link in its place at any time."""
    for name in ("run", "mine"):
        lines = growing_files.append_to(str(tmp_path / name / "log"), bool)
        lines.write(b'{"step": 1}\n')
        lines.close()
    lines = growing_files.append_to(str(tmp_path / "run" / "log"), bool)
    os.rename(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "run").symlink_to(tmp_path / "mine")
    with pytest.raises(
        FileNotFoundError, match="log was replaced by another file, which is not moved"
    ):
        lines.set_aside()
    lines.close()
    assert os.listdir(tmp_path / "mine") == ["log"]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "file"
    put(kind, path, tmp_path / "victims")
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        for read in (open_regular, open_for_reading, lambda name: read_small(name, 100)):
            with pytest.raises(OSError, match=re.escape(str(name))) as error:
                read(str(name))
            assert error.value.errno in (errno.EINVAL, errno.EISDIR)


def test_links_to_regular_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_small(str(tmp_path / "link"), 5) == b"12345"
    with pytest.raises(ValueError, match="file: has more than 4 bytes"):
        read_small(str(tmp_path / "file"), 4)


def test_a_part_of_a_log_that_is_a_link_is_not_read(tmp_path):
    """The log itself may be a link: its user has named it."""
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "log").write_bytes(LINE)
    (tmp_path / "latest").symlink_to("log")
    files = growing_files.read_log_files(str(tmp_path / "latest"))
    assert [list(lines) for _, lines in files] == [[LINE]]
    (tmp_path / "log.1").symlink_to("secret")
    with pytest.raises(OSError, match="is a link, not a regular file"):
        list(growing_files.read_log_files(str(tmp_path / "log")))
    with pytest.raises(OSError, match="is a link, not a regular file"):
        growing_files.read_tail(str(tmp_path / "log"))


def test_appending_leaves_the_other_names_of_a_file_alone(tmp_path):
    """A backup of hard links, as `cp -al` makes one."""
    path, backup = tmp_path / "run" / "log", tmp_path / "backup"
    path.parent.mkdir()
    path.write_bytes(LINE)
    os.link(path, backup)
    with open_own(str(path), BEGINNING) as file:
        file.write(LINE)
    assert path.read_bytes() == 2 * LINE
    assert backup.read_bytes() == LINE
    assert os.listdir(path.parent) == ["log"]


@pytest.mark.parametrize("mode", [0o666, 0o4755, 0o2640, 0o1600, 0o400, 0o4777])
def test_own_files_do_not_take_the_mode_of_what_they_replace(tmp_path, umask, mode):
    umask(0o027)
    for name in ("replaced", "appended"):
        (tmp_path / name).write_bytes(LINE)
        (tmp_path / name).chmod(mode)
    os.link(tmp_path / "appended", tmp_path / "backup")
    replace_file(str(tmp_path / "replaced"), b"new")
    if mode & 0o200:
        open_own(str(tmp_path / "appended"), BEGINNING).close()
        assert stat.S_IMODE((tmp_path / "appended").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "replaced").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("mode", "kept"), [(0o666, 0o666), (0o4755, 0o755), (0o2640, 0o640), (0o1600, 0o600)]
)
def test_a_file_that_the_user_has_named_keeps_its_permissions_alone(tmp_path, umask, mode, kept):
    umask(0o027)
    path = tmp_path / "page"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_named(str(path), b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", kept)


def ended_process():
    """Return the token of a process that has ended."""
    code = "from jstep.stores.owners import new_token; print(new_token())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_temporary_files_of_dead_processes_go(tmp_path):
    """At the next writing of the file; those of others, and what only looks like one, stay."""
    dead, mine = ended_process(), owners.new_token()
    place, pid, started, end = dead.split("-")
    page = tmp_path / "report.html"
    kept = [
        owners.temporary_path(str(page), mine),
        # Of another host or container.
        owners.temporary_path(str(page), f"00000000-{pid}-{started}-{end}"),
        owners.temporary_path(str(tmp_path / "other.html"), dead),
        str(tmp_path / f".report.html.{'0' * 32}"),  # of an earlier version
        str(tmp_path / f".report.html.{dead}.tmp.bak"),
        str(tmp_path / f".report.html.{place}-{pid}-{started}.tmp"),
    ]
    # Left elsewhere, long ago.
    abandoned = owners.temporary_path(str(page), f"11111111-{pid}-{started}-{end}")
    for path in (*kept, abandoned, owners.temporary_path(str(page), dead)):
        with open(path, "wb") as file:
            file.write(TEXT)
    for path in (kept[0], abandoned):
        os.utime(path, (0, 0))
    (tmp_path / "victim").write_bytes(TEXT)
    link = owners.temporary_path(str(page), dead[:-1] + ("0" if dead[-1] != "0" else "1"))
    os.symlink(tmp_path / "victim", link)
    folder = owners.temporary_path(str(page), dead[:-8] + "0" * 8)
    os.mkdir(folder)
    replace_file(str(page), b"new")
    assert sorted(map(str, tmp_path.iterdir())) == sorted(
        [*kept, link, folder, str(page), str(tmp_path / "victim")]
    )
    owners.remove_temporary(str(tmp_path))
    assert not os.path.exists(owners.temporary_path(str(tmp_path / "other.html"), dead))
    assert os.path.exists(kept[0])
    assert owners._TEMPORARY.fullmatch(os.path.basename(kept[0]))["pid"] == str(os.getpid())
    assert (tmp_path / "victim").read_bytes() == TEXT


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 10**400}, {"pid": -1}, {"pid": True}, {"pid": [1]}, {"pid": None}, {"pid": 2**40},
        {"space": 5},
    ],
)  # fmt: skip
def test_a_process_that_cannot_be_is_not_alive(change):
    assert not owners.is_alive({**owners.this_process(), **change})


def test_nesting_is_no_owner():
    assert owners.owner_in(b"[" * 100_000) == {}
