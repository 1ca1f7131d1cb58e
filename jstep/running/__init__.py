"""How do users run a loop?

- `attached`: the observers that are attached to each run.
- `run`: `Run`, with the body of a loop.
- `train`: `train`: a `Run` whose body is empty.
"""
