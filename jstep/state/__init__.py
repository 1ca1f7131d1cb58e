"""What is a training state?

- `copies`: replacing parameters, with the slots that are copies of them.
- `fingerprints`: the bits of arrays as numbers.
- `global_step`: the global step: the number of training steps completed.
- `interrupted`: the last complete state of a run that an exception ended.
- `leaves`: one pass over the leaves, for whoever needs them.
- `nonfinite`: NaN and infinity in the parameters and slots of a state.
- `sharding`: shardings of states, from specs, rules or FSDP.
- `slots`: slots by name and by parameter.
- `train_state`: `TrainState`, and its creation.
"""
