"""How are weights exchanged with other libraries, as safetensors?

- `load`: `load_weights`.
- `matching_tensors`: the tensors of the leaves of a target.
- `orbax_checkpoint`: reading of checkpoints that Orbax wrote.
- `save`: `save_weights`.
- `search`: what a path names.
- `tensors`: tensors of safetensors files.
"""
