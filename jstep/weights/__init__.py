"""How are weights exchanged with other libraries, as safetensors?

- `load`: `load_weights`.
- `matching_tensors`: matching of tensors to the leaves of a target, and their placement.
- `orbax_checkpoint`: reading of checkpoints that Orbax wrote.
- `save`: `save_weights`.
- `search`: what a path names: a file, an index, a directory, arrays of Orbax.
- `tensors`: tensors of safetensors files: headers, and parts of tensors.
"""
