"""How are weights exchanged with other libraries, as safetensors?

- `load`: `load_weights`.
- `matching_tensors`: the tensors of the leaves of a target.
- `save`: `save_weights`.
- `search`: what a path names.
- `tensors`: tensors of safetensors files.
"""
