"""Collectives parsed from the HLO of compiled programs for CPUs, GPUs and TPUs."""

import re
from pathlib import Path

import pytest

from jstep.tools.collectives import collectives_of
from jstep.tools.compiled import parse_program

PROGRAMS = Path(__file__).parent / "compiled_programs"
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
    assert collectives_of(parse_program(read_program(name))) == EXPECTED[name]


def test_trip_counts_match_those_of_the_compiler():
    """The GPU compiler annotates trip counts; without annotations, they follow from the loop counter."""
    text = read_program("nested_gpu_0_12_0_1")
    assert re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text) == ["3", "5", "7"]
    assert collectives_of(parse_program(text.replace("known_trip_count", ""))) == NESTED


def test_async_collectives_are_counted_once():
    """The continuation of a collective is counted only if its start is not in the program."""
    text = read_program("fsdp_tpu_0_10_2")
    assert text.count('chain_id="0"') == 3
    without = text.replace("AsyncCollectiveStart", "Other")
    assert collectives_of(parse_program(without))["all-gather"].number == 2 + 3
    one_channel = re.sub(r"channel_id=\d+", "channel_id=1", text)
    assert collectives_of(parse_program(one_channel)) == EXPECTED["fsdp_tpu_0_10_2"]


LOOP = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}}

%body (p: (s32[], f32[4,8], s32[])) -> (s32[], f32[4,8], s32[]) {{
  %p = (s32[]{{:T(128)}}, f32[4,8]{{1,0:T(8,128)S(1)}}, s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %step = s32[] constant({step})
  %next = s32[] {operation}(%i, %step)
  %g = f32[4,8]{{1,0:T(8,128)S(1)}} get-tuple-element(%p), index=1
  %limit = s32[] get-tuple-element(%p), index=2
  %sum = f32[4,8]{{1,0:T(8,128)S(1)}} all-reduce(%g), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %out = (s32[], f32[4,8], /*index=2*/s32[]) tuple(%next, %sum, %limit)
}}

%cond (q: (s32[], f32[4,8], s32[])) -> pred[] {{
  %q = (s32[], f32[4,8]{{1,0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] get-tuple-element(%q), index=2
  ROOT %lt = pred[] compare({compared}), direction={direction}
}}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %stop = s32[] {stop}
  %t = (s32[], f32[4,8]{{1,0}}, s32[]) tuple(%copied, %x, %stop)
  %w = (s32[], f32[4,8]{{1,0}}, s32[]) while(%t), condition=%cond, body=%body
  ROOT %r = f32[4,8]{{1,0}} get-tuple-element(%w), index=1
}}
"""
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
    found = collectives_of(parse_program(LOOP.format(**(FORWARD | changed))))
    assert found == ({"all-reduce": (runs, runs * 128)} if runs else {})


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %r = f32[] add(%a, %a)
}

%small (s: f32[4,8]) -> f32[4,8] {
  %s = f32[4,8]{1,0} parameter(0)
  ROOT %all-reduce.2 = f32[4,8]{1,0} all-reduce(%s), replica_groups={{0,1}}, to_apply=%add
}

%large (l: f32[4,8]) -> f32[4,8] {
  %l = f32[4,8]{1,0} parameter(0)
  %gathered = f32[8,8]{1,0} all-gather(%l), replica_groups=mesh['a'=2] {'a'}, dimensions={0}
  ROOT %half = f32[4,8]{1,0} slice(%gathered), slice={[0:4], [0:8]}
}

%called (c: f32[4,8]) -> f32[2,8] {
  %c = f32[4,8]{1,0} parameter(0)
  ROOT %rs = f32[2,8]{1,0} reduce-scatter(%c), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[4,8], i: s32[]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[4,8]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}
  %z = f32[2,8]{1,0} call(%x), to_apply=%called, metadata={op_name="calls=%small, while(body=%small)"}
  %as = ((f32[4,8]{1,0}), f32[2,8]{1,0}, u32[]) async-start(%x), calls=%called
  %ad = f32[2,8]{1,0} async-done(%as), calls=%called
  %new = f32[2,8]{1,0} an-opcode-of-tomorrow(%x), called_computations={%called}
  %ags = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %agd = f32[8,8]{1,0} all-gather-done(%ags)
  %n = s4[64,2]{1,0:T(8,128)E(4)} parameter(2)
  %m = pred[3]{0} parameter(3)
  %k = f8e4m3fn[7]{0} parameter(4)
  %ata = (s4[64,2]{1,0:E(4)}, pred[3]{0}, f8e4m3fn[7]{0}) all-to-all(%n, %m, %k), replica_groups={{0,1}}
  %cps = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %cpd = f32[4,8]{1,0} collective-permute-done(%cps)
  %tok = token[] after-all()
  %cb = (f32[4,8]{1,0}, u32[], token[]) send(%x, %tok), channel_id=1, is_host_transfer=true
  %p2p = (f32[4,8]{1,0}, u32[], token[]) send(%x, %tok), channel_id=2
  %p2d = token[] send-done(%p2p), channel_id=2
  ROOT %r = f32[4,8]{1,0} copy(%x)
}
"""


def test_program_with_every_collective():
    assert collectives_of(parse_program(PROGRAM)) == {
        "all-gather": (2, 256 + 256),  # one in the branch that moves more
        "reduce-scatter": (3, 3 * 128),  # the input, which is larger than the output
        "all-to-all": (1, 64 + 3 + 7),
        "collective-permute": (2, 128 + 128),  # one is written as a send; sends to the host do not count
    }


def test_invalid_programs_have_no_collectives():
    assert collectives_of(parse_program("")) == {}
    assert (
        collectives_of(parse_program("HloModule m\n\nENTRY %main () -> () {\n  all-reduce(\n  %x = all-reduce\n}\n"))
        == {}
    )
