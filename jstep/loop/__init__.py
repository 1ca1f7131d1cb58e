"""How does a run go on?

- `arguments`: the arguments of `train`, validated.
- `background`: `flush` and `saved` of hooks.
- `compiling`: when programs are compiled.
- `course`: the state machine: where a run is, and what replaced its state.
- `dispatch`: the calls of programs, with checks and warnings of the first one.
- `feeder`: the batches, perhaps read ahead.
- `finiteness`: whether the state may be saved.
- `hook_runner`: the calls of hooks in the loop's thread.
- `origin`: what a run begins from.
- `programs`: stages, programs and chunks.
- `run`: `Run`, with the body of a loop.
- `run_context`: what the loop, its hooks and its observers share; the interface of observers.
- `saving`: the checkpoint of a run.
- `signals`: signals, a time limit, and stops of several processes.
- `start`: how a run is opened, with its hooks, the user's and the built-in ones.
- `start_times`: what a start does, in seconds, and how many programs each thread compiles.
- `stopping`: how a run ends in each phase.
- `train`: `train`: a `Run` whose body is empty.
"""
