"""What does an optimizer keep for a parameter?

- `compact_numbers`: integer codes with scales, bfloat16 with a remainder.
- `indexed_slices`: sparse gradients of tables, such as embeddings.
- `matching`: gradients and slots, and the parameters that they belong to.
- `optax_transformations`: Optax transformations as optimizers.
- `roles`: the roles of slots, declared by the optimizer that creates them.
"""
