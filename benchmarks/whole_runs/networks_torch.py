"""The networks of the whole runs in PyTorch, for Lightning and the Hugging Face Trainer."""

import torch
from torch import nn


def digits():
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.SiLU(),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(128, 128), nn.Parameter(0.1 * torch.randn(64, 128))
        block = nn.TransformerEncoderLayer(
            128,
            4,
            512,
            dropout=0.0,
            activation=nn.functional.silu,
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(128), enable_nested_tensor=False)
        self.head = nn.Linear(128, 128)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(64), persistent=False
        )

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.position, self.mask, is_causal=True))


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))


NETWORKS = {"digits": digits, "transformer": Transformer, "mlp": mlp}
