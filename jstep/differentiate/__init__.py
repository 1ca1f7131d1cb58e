"""How does a loss become gradients?

- `clipping`: clipping of gradients, and norms.
- `gradients`: gradients of functions of trees, and functions of gradients.
- `lane_state`: merging the leaves of model_state that the lanes of a batch return.
- `lanes`: a batch in L lanes, summed in a binary tree: the same bits on any devices.
- `lookup`: embedding lookup with sparse gradients.
- `loss_gradients`: differentiation of a loss: whole, in microbatches, in lanes.
- `loss_outputs`: what a loss returns beside its value.
- `merging`: merging of equal operations in traced programs, for lanes.
- `microbatches`: splitting a batch, accumulating gradients.
- `reproducible`: bitwise reproducible evaluation of a function on any number of devices.
"""
