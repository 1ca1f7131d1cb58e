"""What was each start of a run given, and how did it go?

- `code`: the commit of a program, and its edits.
- `config`: what a run was given, as JSON without secrets.
- `differences`: the differences of two starts.
- `process_files`: the files of all processes but the first.
- `run_record`: access to the record of the run in progress.
- `schema`: the schema of the files of a run.
- `stall_files`: the files `stalls/PREFIX.PROCESS.json`.
- `state_changes`: what replaced the state between two calls.
- `starts`: the files `starts/PREFIX.NNNNNN.json`.
"""
