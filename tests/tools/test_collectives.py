"""Collectives parsed from the HLO of compiled programs for CPUs, GPUs and TPUs."""

import re
import string
from pathlib import Path

import pytest

from jstep.tools.collectives import count_collectives
from jstep.tools.compiled import parse_program

PROGRAMS = Path(__file__).parent / "compiled_programs"
WRITTEN = Path(__file__).parent / "written_programs"
"""Programs that were written for these tests."""
A, B, X, F, LOSS = 512 * 256, 256, 256 * 1024, 1024, 1
"""Numbers of elements of the MLP's parameters. FSDP shards a, x and f over 8 devices; b is replicated."""
STACK = 2 * 8 * 64 * 256
"""Number of elements of 8 layers with two matrices each."""
PART = 4 * 128 * 256
"""Bytes per device that the programs with shard_map exchange."""
MANUAL = {"reduce-scatter": (1, 8 * PART), "all-to-all": (1, PART), "collective-permute": (1, PART)}
NESTED = {"all-reduce": (5 * 3 + 1 + 1 + 7, 24 * PART), "all-gather": (5 + 1, 6 * 8 * PART)}
"""5 × (3 sums and a gather), a loop of unknown length (a maximum in its condition, a sum in its body), 7 sums, and a
conditional whose branches gather or sum, of which the gather moves more."""
EXPECTED = {
    "fsdp_tpu_0_10_2": {
        "all-reduce": (1, 4 * (B + F + LOSS)),  # f is small and reduced on all devices
        "all-gather": (3, 2 * (A + X) + 4 * F),  # matrices are gathered in bfloat16, one of them asynchronously
        "reduce-scatter": (1, 4 * (A + X)),
    },
    "fsdp_tpu7x_0_10_2": {  # calls that run concurrently on another core
        "all-reduce": (1, 4 * (B + F + LOSS)),
        "all-gather": (3, 2 * (A + X) + 4 * F),
        "reduce-scatter": (2, 4 * (A + X)),
    },
    "fsdp_gpu_0_10_2": {
        "all-reduce": (1, 4 * (B + LOSS)),
        "all-gather": (1, 4 * (A + X + F)),
        "reduce-scatter": (1, 4 * (A + X + F)),
    },
    "fsdp_gpu_0_12_0_1": {
        "all-reduce": (1, 4 * (B + LOSS)),
        "all-gather": (1, 4 * (A + X + F)),
        "reduce-scatter": (1, 4 * (A + X + F)),
    },
    "manual_tpu_0_10_2": {
        "all-reduce": (1, 2 * PART),
        "all-gather": (2, 8 * PART + 8 * PART // 2),  # equal shapes and channels, one in bfloat16
        **MANUAL,
    },
    "manual_gpu_0_10_2": {"all-reduce": (1, 2 * PART), "all-gather": (1, 2 * 8 * PART), **MANUAL},
    "nested_tpu_0_10_2": NESTED,
    "nested_tpu_0_12_0_1": NESTED,
    "nested_gpu_0_12_0_1": NESTED,
    "stacked_tpu_0_10_2": {
        "all-reduce": (8 + 1, 8 * 4 * STACK // 8 + 4),  # the gradients of each layer, and the loss
        "all-gather": (4 * 8, 2 * 8 * 2 * STACK),  # all layers in bfloat16 for each layer, forward and backward
    },
    "two_slices_tpu_0_10_2": {
        "all-reduce": (1, 4 * 2048),  # the other gradients and the loss, padded
        "all-gather": (2, 4 * (A + X)),
        "reduce-scatter": (2, 4 * (A + X)),
        "between slices": (3, 4 * ((A + X) // 16 + 2048)),
    },
}


def read_program(name):
    return (PROGRAMS / f"{name}.txt").read_text()


def test_every_recorded_program_is_tested():
    assert {path.stem for path in PROGRAMS.iterdir()} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_programs(name):
    assert count_collectives(parse_program(read_program(name))) == EXPECTED[name]


def test_trip_counts_match_those_of_the_compiler():
    """The GPU compiler annotates trip counts; without annotations, they follow from the loop counter."""
    text = read_program("nested_gpu_0_12_0_1")
    assert re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text) == ["3", "5", "7"]
    assert count_collectives(parse_program(text.replace("known_trip_count", ""))) == NESTED


def test_async_collectives_are_counted_once():
    """The continuation of a collective is counted only if its start is not in the program."""
    text = read_program("fsdp_tpu_0_10_2")
    assert text.count('chain_id="0"') == 3
    without = text.replace("AsyncCollectiveStart", "Other")
    assert count_collectives(parse_program(without))["all-gather"].number == 2 + 3
    one_channel = re.sub(r"channel_id=\d+", "channel_id=1", text)
    assert count_collectives(parse_program(one_channel)) == EXPECTED["fsdp_tpu_0_10_2"]


FORWARD = {
    "step": 1,
    "operation": "add",
    "compared": "%j, %end",
    "direction": "LT",
    "start": 0,
    "stop": "constant(5)",
}


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({}, 5),
        ({"start": 1}, 4),
        ({"start": 7}, 0),
        ({"step": 2}, 3),
        ({"direction": "LE"}, 6),
        ({"direction": "NE"}, 5),
        ({"direction": "NE", "step": 2}, 1),  # skips its end: unknown
        ({"compared": "%end, %j", "direction": "GT"}, 5),
        ({"operation": "subtract", "start": 9, "direction": "GT"}, 4),
        ({"operation": "subtract", "start": 9, "direction": "GE", "step": 2}, 3),
        ({"operation": "subtract"}, 1),  # never ends: unknown
        ({"stop": "parameter(1)"}, 1),
        ({"operation": "multiply"}, 1),
    ],
)
def test_trip_count_follows_from_the_counter(changed, runs):
    loop = string.Template((WRITTEN / "loop.txt").read_text()).substitute(FORWARD | changed)
    found = count_collectives(parse_program(loop))
    assert found == ({"all-reduce": (runs, runs * 128)} if runs else {})


def test_program_with_every_collective():
    assert count_collectives(parse_program((WRITTEN / "every_collective.txt").read_text())) == {
        "all-gather": (2, 256 + 256),  # one in the branch that moves more
        "reduce-scatter": (3, 3 * 128),  # the input, which is larger than the output
        "all-to-all": (1, 64 + 3 + 7),
        "collective-permute": (2, 128 + 128),  # one is written as a send; sends to the host do not count
    }


def test_invalid_programs_have_no_collectives():
    assert count_collectives(parse_program("")) == {}
    assert (
        count_collectives(parse_program("HloModule m\n\nENTRY %main () -> () {\n  all-reduce(\n  %x = all-reduce\n}\n"))
        == {}
    )
