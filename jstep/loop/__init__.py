"""How does a run proceed?

- `background`: `flush` and `saved` of hooks.
- `build_hooks`: the hooks, the user's and the built-in ones.
- `contents`: what a checkpoint contains in addition to the state.
- `ending`: the end as one transaction.
- `feeder`: the batches, perhaps read ahead.
- `finiteness`: whether the state may be saved.
- `hook_errors`: the errors of hooks, of which none keeps the others from being called.
- `hook_runner`: the calls of hooks in the loop's thread.
- `observer`: what a run tells the rooms that are attached to it.
- `run_context`: what the loop, its hooks and its observers share.
- `saving`: when the checkpoint of a run is saved, and what prevents it.
- `start`: how a run is opened.
- `stopping`: how a run ends at each moment.
"""
