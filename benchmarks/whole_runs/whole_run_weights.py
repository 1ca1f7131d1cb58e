"""The same initial weights in each toolkit, converted from those in a task's file.

`task.weights` maps the path of a leaf of `networks_jax.py`, such as `block1/qkv/kernel`, to its
array. Programs call one of these functions in a line that is not counted, like those of the marks.
"""

import numpy as np


def tree_of(weights):
    """Return the weights as a tree of dictionaries: the parameters of `networks_jax.py`."""
    tree = {}
    for path, array in weights.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree


def _attention(block):
    """Return the kernel and bias of query, key, value and of the output, per head, as in Flax and
    Keras."""
    kernels, biases = np.split(block["qkv"]["kernel"], 3, 1), np.split(block["qkv"]["bias"], 3)
    pairs = [
        (k.reshape(128, 4, 32), b.reshape(4, 32)) for k, b in zip(kernels, biases, strict=True)
    ]
    return [*pairs, (block["out"]["kernel"].reshape(4, 32, 128), block["out"]["bias"])]


def for_flax(task):
    """Return the parameters of a module of `networks_flax.py`."""
    params = tree_of(task.weights)
    if task.name == "transformer":
        params["embed"] = {"embedding": params["embed"]}
        for block in (params["block1"], params["block2"]):
            pairs = zip(("query", "key", "value", "out"), _attention(block), strict=True)
            block["attention"] = {
                name: {"kernel": kernel, "bias": bias} for name, (kernel, bias) in pairs
            }
            del block["qkv"], block["out"]
    return params


def to_keras(task, model):
    """Set the weights of a model of `networks_keras.py`."""
    tree = tree_of(task.weights)
    if task.name == "transformer":
        model.get_layer("embed").set_weights([tree.pop("embed"), tree.pop("position")])
        for name in ("block1", "block2"):
            block = tree.pop(name)
            flat = [array for pair in _attention(block) for array in pair]
            model.get_layer(f"{name}_attention").set_weights(flat)
            tree |= {f"{name}_{part}": block[part] for part in ("norm1", "norm2", "up", "down")}
    for name, layer in tree.items():
        model.get_layer(name).set_weights(
            [layer["scale"] if "scale" in layer else layer["kernel"], layer["bias"]]
        )


def to_torch(task, net):
    """Set the weights of a network of `networks_torch.py`."""
    import torch

    tree = tree_of(task.weights)
    if task.name == "transformer":
        state = {"embed.weight": tree["embed"], "position": tree["position"]}
        names = {
            "norm1": "norm1",
            "norm2": "norm2",
            "out": "self_attn.out_proj",
            "up": "linear1",
            "down": "linear2",
        }
        for i, block in enumerate((tree["block1"], tree["block2"])):
            for ours, theirs in names.items():
                state |= _linear(f"blocks.layers.{i}.{theirs}", block[ours])
            qkv = _linear("", block["qkv"])
            state |= {
                f"blocks.layers.{i}.self_attn.in_proj_{name[1:]}": array
                for name, array in qkv.items()
            }
        state |= _linear("blocks.norm", tree["norm"]) | _linear("head", tree["head"])
    else:
        if task.name == "digits":  # from (height, width, channel) to (channel, height, width)
            kernel = tree["dense1"]["kernel"].reshape(4, 4, 64, 128).transpose(2, 0, 1, 3)
            tree["dense1"]["kernel"] = kernel.reshape(1024, 128)
        layers = [
            name for name, module in net.named_children() if any(True for _ in module.parameters())
        ]
        pairs = zip(layers, tree.values(), strict=True)
        state = {key: array for name, layer in pairs for key, array in _linear(name, layer).items()}
    net.load_state_dict(
        {name: torch.tensor(np.ascontiguousarray(array)) for name, array in state.items()}
    )


def _linear(name, layer):
    """Return the weight and bias of a layer of PyTorch: of a convolution, of a dense one, or of a
    normalization."""
    weight = layer["scale"] if "scale" in layer else layer["kernel"]
    if weight.ndim == 4:
        weight = weight.transpose(3, 2, 0, 1)
    else:
        weight = {1: weight, 2: weight.T}[weight.ndim]
    return {f"{name}.weight": weight, f"{name}.bias": layer["bias"]}
