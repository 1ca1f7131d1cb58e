"""What does a folder say? Runs and checkpoints, by their files alone; JAX is imported to decode arrays alone.

- `cli`: the command line.
- `runs`: the runs below directories, as a tree.
- `run_folder`: what the folder of a run holds; its starts as text.
- `run_summary`: what a run was and how it ended.
- `goodput`: where the time of a run went.
- `diff`: how two checkpoints or runs differ, and from which step on.
- `checkpoints`: `inspect`.
- `checkpoint_positions`: the positions in a checkpoint.
- `arrays`: the range of an array, and how two differ.
- `events`: scalars of runs by step.
- `stalled_processes`: processes that hang, and what they wait for.
- `report`: the page of runs.
- `page`: the sections of the page.
- `sweep`: what the page shows of each run, and of runs beside each other.
"""
