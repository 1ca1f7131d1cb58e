"""What does a folder say? Runs and checkpoints, by their files alone; without JAX.

- `cli`: the command line: its commands, exit codes, text and strict JSON.
- `runs`: find the runs below directories; their table, as a tree of branches.
- `run_folder`: what the folder of a run holds, read when it is asked for: starts, changes, event files, losses.
- `run_summary`: what a run was and how it ended.
- `starts`: the starts of a run as text, and what each changed.
- `goodput`: where the time of a run went.
- `diff`: the leaves in which two checkpoints differ, the step at which two runs diverge.
- `divergence`: that step, also by fingerprints and scalars.
- `checkpoints`: `inspect`, checkpoints, leaf by leaf.
- `positions`: the positions of loaders, and of the objects of a loop, in a checkpoint.
- `ranges`: the range of an array, and its numbers that are not finite.
- `events`: scalars of runs by step.
- `stalls`: processes that hang, and what they wait for.
- `report`: the page of runs: its frame and its command.
- `page`: the sections of the page.
- `run_files`: what a page shows of a run: what is odd, and its curves.
- `sweep`: runs beside each other: the metric, the options, the seeds.
"""
