"""The networks of the whole runs in Flax."""

from flax import linen as nn


class Digits(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.25, deterministic=not train)(nn.relu(nn.Dense(128)(x)))
        return nn.Dense(10)(x)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        mask = nn.make_causal_mask(x)
        x = nn.Embed(128, 128)(x) + self.param("position", nn.initializers.normal(0.1), (64, 128))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm(1e-5)(x), mask=mask)
            x = x + nn.Dense(128)(nn.relu(nn.Dense(512)(nn.LayerNorm(1e-5)(x))))
        return nn.Dense(128)(nn.LayerNorm(1e-5)(x))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


NETWORKS = {"digits": Digits, "transformer": Transformer, "mlp": Mlp}
