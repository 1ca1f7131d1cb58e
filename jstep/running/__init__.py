"""How do users run a loop?

- `observers`: the list of observers, which record and show a run.
- `run`: `Run`, with the body of a loop.
- `train`: `train`: a `Run` whose body is empty.
"""
