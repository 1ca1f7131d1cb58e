"""How are files and objects read and written? tensorstore is imported when the first URL is used.

- `checked_json`: JSON that is checked against types.
- `compile_cache`: JAX's compilation cache during a run.
- `event_files`: reading of event files.
- `files`: atomic and durable files and objects.
- `growing_files`: growing files and logs of lines, also in buckets.
- `objects`: the objects below a URL.
- `owners`: the process that a file names.
- `tagged_arrays`: arrays in tagged JSON.
- `tagged_json`: JSON with further types.
- `untrusted`: what a reader opens, follows, counts and names of what somebody else wrote.
- `urls`: paths and URLs.
"""
