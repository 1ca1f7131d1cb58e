"""How are files and objects read and written? tensorstore is imported when the first URL is used.

- `compile_cache`: JAX's compilation cache during a run.
- `event_files`: reading of event files.
- `files`: atomic and durable files and objects.
- `growing_files`: growing files, also in buckets.
- `line_logs`: logs of JSON lines.
- `objects`: the objects below a URL.
- `owners`: the process that a file names.
- `tagged_arrays`: arrays in tagged JSON.
- `tagged_json`: JSON with further types.
- `urls`: paths and URLs.
"""
