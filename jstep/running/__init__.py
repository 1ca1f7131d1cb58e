"""How is a run held?

- `observers`: the list of those that record and show a run.
- `run`: `Run`, with the body of a loop.
- `train`: `train`: a `Run` whose body is empty.
"""
