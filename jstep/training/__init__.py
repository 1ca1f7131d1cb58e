"""What does one step do? It is compiled, donates its state, and increments the step.

- `apply_gradients`: one optimizer update of the state.
- `explain`: explanations of errors of a step.
- `looped`: several steps in one call.
- `metrics`: the metrics of a step.
- `minimize`: steps from a loss function.
- `optimizer_metrics`: what the optimizers of a custom step report.
- `skipped_updates`: skipped updates of steps that jstep did not make.
- `step`: the compiled step, and the kind of state that it returns.
- `watched_updates`: what the updates of a step train, and warnings of them.
"""
