"""How do gradients become updates?

- `adam`: Adam and its variants, and Adafactor.
- `averages`: moving averages, and Lookahead's slow weights.
- `by_slices`: updates of large leaves in slices.
- `chains`: chains, scopes, and partitions of the parameters.
- `classic`: classic optimizers: gradient descent, momentum, Adagrad, RMSProp.
- `compact`: compact storage of slots between updates.
- `draws`: random numbers of several updates in one step.
- `from_optax`: Optax transformations.
- `gradient_transformations`: elements of chains.
- `guards`: guards and constraints of an update, and every k-th step.
- `host_slots`: slots in host memory.
- `hyperparameters`: numbers, schedules, or values in the state.
- `layerwise`: LAMB, LARS and NovoGrad.
- `leaf_values`: masks and numbers of each leaf.
- `low_precision`: master weights, and stochastic rounding.
- `muon`: Muon, and its distribution over devices.
- `nested`: optimizers inside others.
- `parameter_free`: schedule-free optimizers and Prodigy.
- `rules`: optimizers from the equation of one leaf.
- `sign`: Lion, Signum, Rprop.
- `soap`: Adam in the eigenbases of averaged g·gᵀ.
- `updates`: the addition of updates to parameters.
"""
