"""How is a state saved, and restored? tensorstore is imported when a Saver saves or restores.

- `array_reader`: arrays of checkpoints, read by tensorstore, which verifies what it reads.
- `array_writer`: arrays of checkpoints in Orbax's format, written by tensorstore.
- `attempts`: one save, in a background thread of each process.
- `claims`: the lock of the one writer of a prefix.
- `directory_store`: a store in a directory.
- `hook_states`: the states of hooks and of evaluation callbacks.
- `leaf_records`: records of a state's leaves in a checkpoint, and their stored arrays.
- `listing`: the checkpoints of a directory, and which are complete.
- `manifest`: the description of a checkpoint, with its own checksum.
- `match`: the leaves of a target and those of a checkpoint.
- `names`: names of checkpoints, and the store of a directory or URL.
- `object_store`: a store below a URL.
- `reading`: finding, verifying and restoring.
- `retention`: which checkpoints are deleted, and when.
- `saver`: `Saver`, which writes in the background.
- `store`: the base class of stores.
- `targets`: a target is filled from saved arrays.
"""
