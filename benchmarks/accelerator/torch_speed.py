"""PyTorch's fused optimizers over the shapes of the part speed: prints its rows as JSON.

python torch_speed.py '{"16 × 4M": [[2048, 2048], …], …}'
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAKE = {
    "adamw": lambda leaves: torch.optim.AdamW(leaves, 1e-3, weight_decay=1e-2, fused=True),
    "sgd": lambda leaves: torch.optim.SGD(leaves, 0.1, momentum=0.9, fused=True),
}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    if DEVICE == "cpu" and "ACCELERATOR_QUICK" not in os.environ:
        sys.exit(
            f"PyTorch {torch.__version__} finds no GPU: a figure of a CPU beside an "
            "accelerator would mislead"
        )
    found: list[dict[str, Any]] = []
    for sizes, shapes in json.loads(sys.argv[1]).items():
        for name, make in MAKE.items():
            leaves = [torch.nn.Parameter(torch.full(shape, 0.1, device=DEVICE)) for shape in shapes]
            for leaf in leaves:
                # The gradients are there: jstep's row also computes them, in one read more.
                leaf.grad = torch.full_like(leaf, 0.01)
            optimizer = make(leaves)
            times = []
            for _ in range(13):
                synchronize()
                began = time.perf_counter()
                for _ in range(5):
                    optimizer.step()
                synchronize()
                times.append((time.perf_counter() - began) / 5)
            row = {
                "name": f"{name}, {sizes}: PyTorch {torch.__version__}, fused",
                "ms": statistics.median(times[2:]) * 1e3,
            }
            found.append(row | {"device": DEVICE})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
