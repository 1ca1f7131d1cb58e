"""What does one step do? It is compiled, donates its state, and increments the step.

- `apply_gradients`: one optimizer update of the state: params + updates, new slots.
- `explain`: explanations of errors of a training step by its arguments.
- `looped`: several training steps in one call, compiled as a loop.
- `metrics`: the metrics of a step.
- `minimize`: training steps from a loss function, or several, and an optimizer.
- `state_kind`: the kind of the state that a training step returns.
- `step`: the compiled training step, which donates its state.
- `step_updates`: how many updates one step makes.
"""
