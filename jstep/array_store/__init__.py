"""How do bytes become a checkpoint? tensorstore is imported when arrays are written or read.

- `array_index`: the index of the array database, checked before tensorstore reads it.
- `array_reader`: reading and verification of arrays.
- `array_writer`: writing of arrays by tensorstore.
- `attempts`: where a save writes, and its thread.
- `best_record`: which checkpoint of a `KeepBest` is the best.
- `chunk_files`: reading of chunks from the files of a directory.
- `claims`: the lock of the one writer of a prefix.
- `directory_store`: a store in a directory.
- `host_copies`: copies of arrays on CPUs, whose memory is kept between saves.
- `leaf_records`: records of a state's leaves.
- `listing`: which checkpoints a directory has.
- `manifest`: the description of a checkpoint.
- `object_store`: a store below a URL.
- `part_watch`: whether another process still writes.
- `shared_reads`: arrays that several processes need are read once.
- `store`: the base class of stores.
"""
