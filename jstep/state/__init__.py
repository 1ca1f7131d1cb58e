"""The training state: parameters, slots and the global step, and how to shard them."""
