"""How does a loss become gradients?

- `clipping`: clipping of gradients, and norms.
- `gradients`: gradients of functions of trees.
- `lanes`: a batch in lanes, for bitwise identical results on any number of devices.
- `lookup`: embedding lookup with sparse gradients.
- `loss_gradients`: differentiation of a loss.
- `loss_outputs`: what a loss returns in addition to its value.
- `merging`: equal operations in traced programs.
- `microbatches`: splitting a batch.
- `reproducible`: reproducible evaluation on any number of devices.
"""
