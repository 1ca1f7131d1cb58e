"""The states that a disk may hold after a power cut, from a record of calls.

A power cut may come after any call. What the disk holds then depends on the file system, which is
described by a model:

- *prefix*: every call until then took effect. SIGKILL leaves this.
- *ordered* (ext4, XFS, btrfs): folders change in the order of the calls, and lack at most the last
  changes. Bytes that were written after the last fsync of their file are there, lost, there in
  part, or zeros.
- *posix*: of all that no fsync covers, any subset is there: files, renames and deletions in any
  order. The fsync of a file makes its bytes durable, that of a folder its entries.
"""

import itertools
import os
import random
from collections.abc import Mapping
from typing import NamedTuple

from file_calls import Call, Kind, read

Tree = Mapping[str, bytes | None]
"""The path of each file and folder below the recorded folder → bytes; None for a folder."""
Entry = tuple[int, str]
"""The number of a folder and a name in it."""
KEPT, LOST, HALF, ZEROS, CUT = "kept", "lost", "half", "zeros", "cut"
"""What may be left of the bytes that no fsync covers. CUT: nothing but that the file was made
empty, or shorter."""
PREFIX, ORDERED, POSIX = "prefix", "ordered", "posix"
MODELS = (PREFIX, ORDERED, POSIX)
_SINGLE, _RANDOM = 24, 6
"""Most changes of which each is lost alone, and kept alone; number of random subsets: both at each
moment."""


class State(NamedTuple):
    """A state of the disk, the texts marked before the cut, the number of calls before it, and what
    was lost."""

    tree: Tree
    marks: tuple[str, ...]
    at: int
    why: str


class _Change(NamedTuple):
    """A change of folders: of one entry, or of the two of a rename."""

    at: int
    entries: tuple[tuple[Entry, int | None], ...]


class _Data(NamedTuple):
    at: int
    call: Call


class History:
    """What a record, whose first call is the recorded folder itself, says about each file and
    folder."""

    def __init__(self, calls):
        assert calls[0].kind == Kind.MKDIR, "the recorded folder comes first"
        self.folder = calls[0].path
        self._changes = []
        self._data = [[]]
        self._is_folder = [True]
        self._syncs = [[]]
        self._live = {}
        self._by_inode = {calls[0].inode: 0}
        self._contents = {}
        self.marks = []
        self.moments = [0]
        """The numbers of calls after which something differs."""
        for at, call in enumerate(calls[1:], 1):
            self._add(at, call)
            self.moments.append(at)
        self.begin = next((at for at, text in self.marks if text == "start"), 0)

    def _add(self, at, call):
        if call.kind == Kind.MARK:
            self.marks.append((at, call.path))
        elif call.kind in (Kind.CREATE, Kind.MKDIR):
            self._by_inode[call.inode] = made = len(self._data)
            self._data.append([])
            self._syncs.append([])
            self._is_folder.append(call.kind == Kind.MKDIR)
            if call.path:
                self._change(at, (self._entry(call.path), made))
        elif call.kind in (Kind.WRITE, Kind.TRUNCATE):
            self._data[self._by_inode[call.inode]].append(_Data(at, call))
        elif call.kind == Kind.SYNC:
            self._syncs[self._by_inode[call.inode]].append(at)
        elif call.kind in (Kind.UNLINK, Kind.RMDIR):
            self._change(at, (self._entry(call.path), None))
        elif call.kind in (Kind.RENAME, Kind.LINK):
            old, new = self._entry(call.path), self._entry(call.other)
            moved = (new, self._live[old])
            self._change(at, *([(old, None), moved] if call.kind == Kind.RENAME else [moved]))

    def _entry(self, path):
        at = 0
        *folders, name = path.removeprefix(self.folder + "/").split("/")
        for folder in folders:
            at = self._live[at, folder]
        return at, name

    def _change(self, at, *entries):
        self._changes.append(_Change(at, entries))
        for entry, inode in entries:
            if inode is None:
                del self._live[entry]
            else:
                self._live[entry] = inode

    def final(self):
        """Return the state after all calls."""
        return self._tree(self._changes, lambda inode: self._content(inode, self.moments[-1], KEPT))

    def states(self, model, seed=0, share=1.0):
        """Yield the states of a model, possibly equal ones, at a share of all moments."""
        for at in self.moments:
            rng = random.Random(f"{seed} {at}")
            if at >= self.begin and rng.random() < share:
                yield from self._states_at(at, model, rng)

    def _states_at(self, at, model, rng):
        marks = tuple(text for when, text in self.marks if when <= at)
        done = [change for change in self._changes if change.at <= at]
        choose = {PREFIX: self._all, ORDERED: self._first, POSIX: self._any}[model]
        for changes, why in choose(done, at, rng):
            entries = _entries(changes)
            dirty = [] if model == PREFIX else self._dirty(entries.values(), at)
            for data, lost in _fates(dirty, rng, len(changes) in (len(done), 0)):
                tree = self._named(entries, self._content_at(at, data))
                yield State(tree, marks, at, f"{why}; {lost}")

    def _content_at(self, at, fates):
        return lambda inode: self._content(inode, at, fates.get(inode, KEPT))

    def _all(self, done, at, rng):
        yield done, "all names"

    def _first(self, done, at, rng):
        """Yield the changes that may be on the disk if they reach it in their order."""
        durable = 0
        for number, change in enumerate(done, 1):
            concerned = {inode for _, inode in change.entries} | {
                entry[0] for entry, _ in change.entries
            }
            if any(self._synced(inode, change.at, at) for inode in concerned - {None}):
                durable = number
        for count in range(len(done), durable - 1, -1):
            yield (
                done[:count],
                f"the last {len(done) - count} names lost" if count < len(done) else "all names",
            )

    def _any(self, done, at, rng):
        """Yield the subsets of the changes that may be on the disk if they reach it in any
        order."""
        free = [
            change
            for change in done
            if not all(self._synced(entry[0], change.at, at) for entry, _ in change.entries)
        ]
        yield done, "all names"
        single = free if len(free) <= _SINGLE else rng.sample(free, _SINGLE)
        subsets = [free, *([one] for one in single), *(_without(free, one) for one in single)]
        subsets += [
            [one for one in free if rng.random() < share]
            for share in (0.25, 0.5, 0.75) * (_RANDOM // 3)
        ]
        for lost in subsets if free else []:
            gone = set(map(id, lost))
            yield (
                [one for one in done if id(one) not in gone],
                (f"{len(lost)} of {len(free)} names lost"),
            )

    def _synced(self, inode, after, until):
        return inode is not None and any(after < sync <= until for sync in self._syncs[inode])

    def _dirty(self, inodes, at):
        """Return the files with bytes that no fsync covers, and whether they were made shorter
        since it."""
        found = []
        for inode in dict.fromkeys(inodes):
            new = [
                one.call.kind
                for one in self._data[inode]
                if self._last_sync(inode, at) < one.at <= at
            ]
            if new:
                found.append((inode, Kind.TRUNCATE in new))
        return found

    def _last_sync(self, inode, at):
        return max((sync for sync in self._syncs[inode] if sync <= at), default=-1)

    def _content(self, inode, at, fate):
        """Return the bytes of a file at a moment; None for a folder."""
        if self._is_folder[inode]:
            return None
        durable = self._last_sync(inode, at)
        count = sum(one.at <= at for one in self._data[inode])
        key = inode, count, durable, fate
        if key not in self._contents:
            self._contents[key] = _replayed(self._data[inode][:count], durable, fate)
        return self._contents[key]

    def _tree(self, changes, content):
        return self._named(_entries(changes), content)

    @staticmethod
    def _named(entries, content):
        """Return what can be reached from the recorded folder."""
        inside = {}
        for (folder, name), inode in entries.items():
            inside.setdefault(folder, []).append((name, inode))
        tree = {}
        pending = [(0, "")]
        while pending:
            folder, path = pending.pop()
            for name, inode in inside.get(folder, ()):
                tree[path + name] = content(inode)
                if tree[path + name] is None:
                    pending.append((inode, f"{path}{name}/"))
        return tree


def _entries(changes):
    found = {}
    for change in changes:
        for entry, inode in change.entries:
            if inode is None:
                found.pop(entry, None)
            else:
                found[entry] = inode
    return found


def _without(changes, one):
    return [other for other in changes if other is not one]


def _fates(dirty, rng, each):
    """Yield what may be left of files with bytes that no fsync covers; with `each`, also of each
    alone."""
    yield {}, "all bytes"
    if not dirty:
        return
    for fate in (LOST, HALF, ZEROS, CUT):
        yield {inode: fate for inode, shorter in dirty if fate != CUT or shorter}, f"bytes {fate}"
    if len(dirty) > 1 and each:
        for (inode, _), fate in itertools.product(dirty, (LOST, HALF, ZEROS)):
            yield {inode: fate}, f"bytes of one file {fate}"
            yield (
                {other: fate for other, _ in dirty if other != inode},
                (f"bytes of all files but one {fate}"),
            )
    if len(dirty) > 1:
        yield (
            {inode: rng.choice((KEPT, LOST, HALF, ZEROS)) for inode, _ in dirty},
            ("bytes at random"),
        )


def _replayed(data, durable, fate):
    content = bytearray()
    new = [one.call for one in data if one.at > durable]
    left = sum(len(call.data) for call in new if call.kind == Kind.WRITE) // 2
    for at, call in data:
        written = call.data
        if at > durable:
            if fate == LOST or (fate == CUT and call.kind == Kind.WRITE):
                continue
            if fate == ZEROS:
                written = bytes(len(written))
            if fate == HALF:
                written = written[:left]
                left -= len(written)
        if call.kind == Kind.TRUNCATE:
            del content[call.at :]
            content.extend(bytes(call.at - len(content)))
        elif written:
            content.extend(bytes(max(0, call.at - len(content))))
            content[call.at : call.at + len(written)] = written
    return bytes(content)


def distinct(states):
    """Return the states that differ in what the disk holds; of equal ones the last, which has the
    most marks."""
    return list({frozenset(state.tree.items()): state for state in states}.values())


def sampled(states, count, seed=0):
    """Return a random sample of so many states, or all of them if there are no more."""
    return list(states) if len(states) <= count else random.Random(seed).sample(list(states), count)


def tree_of(folder):
    """Return what is in a folder."""
    found = {}
    for top, folders, files in os.walk(folder):
        found |= {os.path.relpath(os.path.join(top, name), folder): None for name in folders}
        for name in files:
            with open(os.path.join(top, name), "rb") as file:
                found[os.path.relpath(file.name, folder)] = file.read()
    return found


def write(tree, folder):
    """Write a state into a new folder."""
    os.makedirs(folder)
    for path, content in sorted(tree.items()):  # a folder comes before what is in it
        if content is None:
            os.mkdir(os.path.join(folder, path))
        else:
            with open(os.path.join(folder, path), "wb") as file:
                file.write(content)


def complete(log, folder):
    """Return the calls of a record, which lead to exactly the bytes in the folder: none was
    missed."""
    calls = read(log)
    assert History(calls).final() == tree_of(str(folder))
    return calls
