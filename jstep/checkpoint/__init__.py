"""How is a state saved, and restored?

- `engine`: the implementation of `Saver`, and what only a run may call.
- `finding`: which checkpoint is read: the newest one, or that of a step.
- `match`: the leaves of a target and of a checkpoint.
- `names`: names of checkpoints, and their stores.
- `opening`: what a run finds when it opens its checkpoints.
- `peers`: what the processes of one save tell each other.
- `reading`: what is read of one checkpoint.
- `retention`: which checkpoints are deleted.
- `save`: one save, from its arrays to the checkpoint.
- `saver`: `Saver`, as users see it.
- `shared_directory`: whether all processes see one directory.
- `targets`: filling a target from saved arrays.
- `verdicts`: whether a checkpoint is intact, and what to do if it is not.
"""
