"""The networks of the whole runs in Keras."""

import keras
from keras import layers


def digits():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="silu", name="conv1"),
            layers.Conv2D(64, 3, padding="same", activation="silu", name="conv2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="silu", name="dense1"),
            layers.Dense(10, name="dense2"),
        ]
    )


class Embed(layers.Layer):
    def __init__(self, name):
        super().__init__(name=name)
        self.token, self.position = layers.Embedding(128, 128), layers.Embedding(64, 128)

    def call(self, x):
        return self.token(x) + self.position(keras.ops.arange(64))


def transformer():
    inputs = keras.Input((64,), dtype="int32")
    x = Embed(name="embed")(inputs)
    for block in ("block1", "block2"):
        h = layers.LayerNormalization(epsilon=1e-5, name=f"{block}_norm1")(x)
        x = x + layers.MultiHeadAttention(4, 32, name=f"{block}_attention")(
            h, h, use_causal_mask=True
        )
        h = layers.LayerNormalization(epsilon=1e-5, name=f"{block}_norm2")(x)
        h = layers.Dense(512, activation="silu", name=f"{block}_up")(h)
        x = x + layers.Dense(128, name=f"{block}_down")(h)
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, layers.Dense(128, name="head")(x))


def mlp():
    hidden = layers.Dense(64, activation="silu", name="dense1")
    return keras.Sequential([keras.Input((64,)), hidden, layers.Dense(10, name="dense2")])


NETWORKS = {"digits": digits, "transformer": transformer, "mlp": mlp}
