"""How are files and objects read and written? tensorstore is imported when the first URL is used.

- `compile_cache`: JAX's persistent compilation cache during a run.
- `event_files`: reading of event files.
- `files`: reading, and atomic and durable writing, of files and objects.
- `growing_files`: growing files, and objects that are uploaded periodically.
- `line_logs`: logs of JSON lines, each of a step: `{"step": N, …}`.
- `objects`: the objects below a URL, in tensorstore's key-value stores.
- `owners`: the process that a file names, and whether it lives.
- `tagged_arrays`: arrays in tagged JSON.
- `tagged_json`: JSON with values that JSON lacks, such as tuples.
- `urls`: local paths and URLs of object stores.
"""
