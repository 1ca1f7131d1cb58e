"""Rates of torch's schedulers, which are stored, so that the quick tests need no torch.

python tests/schedules/torch_rates.py      # with torch installed: writes torch_rates.json
"""

import json
import pathlib
import warnings

PATH = pathlib.Path(__file__).with_suffix(".json")
COUNT = 101
ONE_CYCLE = [
    (share, anneal) for share in (0.0, 0.005, 0.25, 0.3, 0.333, 1.0) for anneal in ("cos", "linear")
]
CYCLICAL = [(7, None), (7, 13), (5, 2)]
CASES = {
    **{
        f"one_cycle {share} {anneal}": lambda schedulers, optimizer, share=share, anneal=anneal: (
            schedulers.OneCycleLR(
                optimizer,
                0.7,
                COUNT,
                pct_start=share,
                anneal_strategy=anneal,
                cycle_momentum=False,
                final_div_factor=100,
            )
        )
        for share, anneal in ONE_CYCLE
    },
    **{
        f"cyclical {up} {down}": lambda schedulers, optimizer, up=up, down=down: (
            schedulers.CyclicLR(optimizer, 0.1, 0.7, up, down, cycle_momentum=False)
        )
        for up, down in CYCLICAL
    },
}


def computed(name):
    """Return the rates of a scheduler at the first COUNT steps."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule, rates = CASES[name](torch.optim.lr_scheduler, optimizer), []
        for i in range(COUNT):
            rates.append(float(schedule.get_last_lr()[0]))
            if i + 1 < COUNT:
                optimizer.step()
                schedule.step()
    return rates


def stored(name):
    """Return the same from the file."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    return found[name]


def main():
    """Write the file, one line for each scheduler."""
    lines = [
        f"{json.dumps(name)}: {json.dumps([float(f'{x:.9g}') for x in computed(name)])}"
        for name in CASES
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
