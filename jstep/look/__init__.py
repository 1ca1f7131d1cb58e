"""What do the files of a run show? JAX is imported only for arrays, positions and fingerprints.

- `cli`: the command line.
- `runs`: the runs below directories, as a tree.
- `run_folder`: the folder of a run, and its starts as text.
- `run_summary`: what a run was and how it ended.
- `goodput`: where the time of a run went.
- `goodput_command`: `goodput`, also of a directory of runs.
- `diff`: how two checkpoints or runs differ, and from which step on.
- `checkpoints`: `inspect`.
- `checkpoint_positions`: the positions in a checkpoint.
- `arrays`: the range of an array, and how two differ.
- `events`: scalars of runs by step.
- `stalled_processes`: processes that hang, and what they wait for.
- `report`: the page of runs.
- `page`: the sections of the page.
- `sweep`: what the page shows about each run, and about several runs.
"""
