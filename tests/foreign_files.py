"""Files of somebody else under the names that jstep writes: each with a victim, which must stay as
it is."""

import os
import pathlib

TEXT = b"what somebody wrote\n"


def _linked(path, victim):
    path.symlink_to(victim)


def _linked_to_nothing(path, victim):
    path.symlink_to(victim.with_name("absent"))


def _linked_to_a_folder(path, victim):
    path.symlink_to(victim.parent)


def _fifo(path, victim):
    os.mkfifo(path)


def _folder(path, victim):
    path.mkdir()
    (path / "inner").write_bytes(TEXT)


def _text(path, victim):
    path.write_bytes(TEXT)


def _other_json(path, victim):
    path.write_bytes(b'{"step": 3, "loss": 0.25}\n{"step": 4, "loss": 0.125}\n')


def _nulls_before_text(path, victim):
    path.write_bytes(bytes(5000) + TEXT)


KINDS = {
    function.__name__[1:]: function
    for function in (
        _linked,
        _linked_to_nothing,
        _linked_to_a_folder,
        _fifo,
        _folder,
        _text,
        _other_json,
        _nulls_before_text,
    )
}
"""What may have the name of a file of jstep."""


def put(kind, path, victims):
    """Put something of a kind in the place of a file, which may lead to a victim; return the folder
    of the victims."""
    victims.mkdir(exist_ok=True)
    victim = victims / "notes"
    victim.write_bytes(TEXT)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path, victim)
    return victims


def contents(path):
    """Return everything of a file, link or folder that a write changes: content, times and sizes;
    no FIFO is opened."""
    path = pathlib.Path(path)
    found = path.lstat()
    about = found.st_mode, found.st_ino, found.st_nlink, found.st_size, found.st_mtime_ns
    if path.is_symlink():
        return about, os.readlink(path)
    if path.is_dir():
        return about, {inner.name: contents(inner) for inner in sorted(path.iterdir())}
    return about, path.read_bytes() if path.is_file() else None
