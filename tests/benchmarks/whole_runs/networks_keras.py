"""The networks of the whole runs in Keras."""

import keras
from keras import layers


def digits():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


class Embed(layers.Layer):
    def __init__(self):
        super().__init__()
        self.token, self.position = layers.Embedding(128, 128), layers.Embedding(64, 128)

    def call(self, x):
        return self.token(x) + self.position(keras.ops.arange(64))


def transformer():
    inputs = keras.Input((64,), dtype="int32")
    x = Embed()(inputs)
    for _ in range(2):
        h = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(4, 32)(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(128)(layers.Dense(512, activation="relu")(h))
    return keras.Model(inputs, layers.Dense(128)(layers.LayerNormalization(epsilon=1e-5)(x)))


def mlp():
    return keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)])


NETWORKS = {"digits": digits, "transformer": transformer, "mlp": mlp}
