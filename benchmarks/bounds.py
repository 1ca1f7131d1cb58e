"""The bounds, limits and reasons of `bounds.toml`: benchmark → (program, compared with) → bound,
limit, or reason."""

import tomllib
from pathlib import Path
from typing import Any

_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _by_pair(kind: str) -> dict[str, dict[tuple[str, str], Any]]:
    return {
        benchmark: {
            (ours, peer): value for ours, peers in programs.items() for peer, value in peers.items()
        }
        for benchmark, programs in _READ[kind].items()
    }


BOUNDS: dict[str, dict[tuple[str, str], float]] = _by_pair("bounds")
LIMITS: dict[str, dict[tuple[str, str], float]] = _by_pair("limits")
REASONS: dict[str, dict[tuple[str, str], str]] = _by_pair("reasons")
