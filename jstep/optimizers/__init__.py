"""How do gradients become updates?

- `adam`: Adam and its variants, and Adafactor.
- `averages`: moving averages, and Lookahead's slow weights.
- `by_slices`: updates of large leaves in loops over slices, for TPUs.
- `chains`: chains, scopes, and partitions of the parameters.
- `classic`: classic optimizers: gradient descent, momentum, Adagrad, RMSProp.
- `compact`: compact storage of slots between updates.
- `constraints`: projections of parameters, and agreement with gradients.
- `from_optax`: use Optax transformations as jstep optimizers.
- `gradient_transformations`: elements of chains: noise, norms, clips, scales, weight decay.
- `guards`: finite gradients, loss scales, updates at every k-th step.
- `host_slots`: slots in host memory.
- `hyperparameters`: hyperparameters: numbers, schedules, or values held in the state.
- `layerwise`: optimizers with one norm per leaf: LAMB, LARS and NovoGrad.
- `leaf_values`: masks and numbers of each leaf, from its path and shape.
- `low_precision`: master weights, and stochastic rounding.
- `muon`: Muon: orthogonalization of matrices, and their distribution over devices.
- `nested`: optimizers inside others.
- `parameter_free`: schedule-free optimizers and Prodigy.
- `rules`: optimizers from the equation of one leaf.
- `sign`: Lion, Signum, Rprop.
- `soap`: Adam in the eigenbases of averaged g·gᵀ.
- `updates`: updates, and their addition to parameters.
"""
