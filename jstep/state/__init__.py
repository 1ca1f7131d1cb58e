"""What is a training state?

- `copies`: slots that are copies of parameters.
- `fingerprints`: the bits of arrays as numbers.
- `global_step`: the global step.
- `leaves`: one pass over the leaves.
- `nonfinite`: NaN and infinity in a state.
- `packed_slots`: slots of few parameters, stored without None.
- `sharding`: shardings of states.
- `slots`: slots by name and by parameter.
- `train_state`: `TrainState`, and its creation.
"""
