"""What happens between steps?

- `at_steps`: a function every n steps, a profiler trace, the end of a run.
- `cadence`: when a hook is due: at multiples of steps, after seconds, at the last step.
- `checkpoint_saver`: the hook that saves checkpoints.
- `course`: where a run is, and what it is doing; its only state machine.
- `hook`: the `Hook` protocol.
- `hook_states`: the states of hooks and callbacks in checkpoints.
- `nan_loss`: the hook that ends a run at a non-finite loss.
- `origin`: what a run begins from.
- `run_extra`: the keys of a checkpoint's `extra`, and their types.
- `run_hook`: the base class of built-in hooks.
- `run_info`: a run, as its built-in hooks see it.
- `saver_hook`: what all hooks that save have in common.
- `timetable`: when something is due: hooks, savers, the body, the ends of calls.
"""
