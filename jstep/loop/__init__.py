"""How does a run proceed?

- `agreement`: what processes compare before the first step.
- `arguments`: the arguments of `train`, validated.
- `background`: `flush` and `saved` of hooks.
- `build_hooks`: the hooks, the user's and the built-in ones.
- `chunks`: the batches of each call, and the steps at which calls end.
- `compiling`: when programs are compiled.
- `contents`: what a checkpoint contains in addition to the state.
- `dispatch`: the calls of programs, with checks and warnings of the first one.
- `ending`: the end as one transaction.
- `feeder`: the batches, perhaps read ahead.
- `finiteness`: whether the state may be saved.
- `hook_errors`: the errors of hooks, of which none keeps the others from being called.
- `hook_runner`: the calls of hooks in the loop's thread.
- `observer`: what a run tells the rooms that are attached to it.
- `origin`: how a run finds and reads what it begins from.
- `parent`: the checkpoint of another run that a branch begins from.
- `programs`: the programs of stages, by the shapes of their batches.
- `run_context`: what the loop, its hooks and its observers share.
- `saving`: when the checkpoint of a run is saved, and what prevents it.
- `signals`: signals, a time limit, and stops of several processes.
- `stages`: the train steps of a run, and where each begins.
- `start`: how a run is opened.
- `start_times`: how long each part of a start takes, and how many programs each thread compiles.
- `stopping`: how a run ends at each moment.
"""
