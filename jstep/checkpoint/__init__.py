"""How is a state saved, and restored? tensorstore is imported when a Saver saves or restores.

- `array_index`: the index of the array database, checked before tensorstore reads it.
- `array_reader`: reading and verification of arrays.
- `array_writer`: writing of arrays by tensorstore.
- `attempts`: one save, in a thread of each process.
- `best_record`: which checkpoint of a `KeepBest` is the best.
- `chunk_files`: reading of chunks from the files of a directory.
- `claims`: the lock of the one writer of a prefix.
- `directory_store`: a store in a directory.
- `engine`: the implementation of `Saver`, and what only a run may call.
- `finding`: which checkpoint is read: the newest one, or that of a step.
- `host_copies`: copies of arrays on CPUs, whose memory is kept between saves.
- `leaf_records`: records of a state's leaves.
- `listing`: which checkpoints a directory has.
- `manifest`: the description of a checkpoint.
- `match`: the leaves of a target and of a checkpoint.
- `names`: names of checkpoints, and their stores.
- `object_store`: a store below a URL.
- `opening`: what a run finds when it opens its checkpoints.
- `part_watch`: whether another process still writes.
- `reading`: what is read of one checkpoint.
- `retention`: which checkpoints are deleted.
- `saver`: `Saver`, as users see it.
- `shared_directory`: whether all processes see one directory.
- `shared_reads`: arrays that several processes need are read once.
- `store`: the base class of stores.
- `targets`: filling a target from saved arrays.
- `verdicts`: whether a checkpoint is intact, and what to do if it is not.
"""
