"""How does a run go on?

- `arguments`: the arguments of `train`, validated before anything is opened.
- `background`: `flush` and `saved` of the user's hooks, in the background.
- `build_hooks`: the hooks of a run, the user's and the built-in ones.
- `compiling`: when programs are compiled: in the background before they are due.
- `course`: where a run is, what it is doing, and what ends it: the one state machine.
- `dispatch`: the calls of programs, and explanations of their errors.
- `feeder`: the batches of a run, perhaps read ahead, as chunks.
- `finiteness`: whether the state may be saved.
- `hook_runner`: the calls of hooks in the loop's thread.
- `origin`: what a run begins from, opened and restored.
- `programs`: stages, the program for the shapes of a batch, the batches of each call.
- `run`: `Run`, with the body of a loop.
- `run_context`: what the loop, its hooks and its observers share.
- `saving`: the checkpoint of a run: the state, and what else a restart needs.
- `signals`: early stops: signals, a time limit, and processes that stop together.
- `start`: a run is opened, while its first batch and program are made.
- `start_times`: what a start does, in seconds.
- `state_changes`: what code of the user replaced in the state, and when.
- `stopping`: how a run ends in each phase, what it saves, its exit code.
- `train`: `train`: a `Run` whose body is empty.
"""
