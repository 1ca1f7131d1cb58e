"""The networks of the whole runs in Flax."""

from flax import linen as nn


class Digits(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Conv(32, (3, 3), name="conv1")(x))
        x = nn.silu(nn.Conv(64, (3, 3), name="conv2")(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        return nn.Dense(10, name="dense2")(nn.silu(nn.Dense(128, name="dense1")(x)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(
            nn.LayerNorm(1e-5, name="norm1")(x), mask=mask
        )
        # On two axes: with three, XLA's CPU backend transposes whole activations in the backward
        # pass.
        rows = nn.LayerNorm(1e-5, name="norm2")(x).reshape(-1, 128)
        h = nn.silu(nn.Dense(512, name="up")(rows))
        return x + nn.Dense(128, name="down")(h).reshape(x.shape)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x)
        x = nn.Embed(128, 128, name="embed")(x)
        x += self.param("position", nn.initializers.normal(0.1), (64, 128))
        x = Block(name="block2")(Block(name="block1")(x, mask), mask)
        rows = nn.LayerNorm(1e-5, name="norm")(x).reshape(-1, 128)
        return nn.Dense(128, name="head")(rows).reshape(x.shape)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="dense2")(nn.silu(nn.Dense(64, name="dense1")(x)))


NETWORKS = {"digits": Digits, "transformer": Transformer, "mlp": Mlp}
