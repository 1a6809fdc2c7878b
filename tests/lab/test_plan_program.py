"""What is read from a program's text, on small texts whose figures are counted by hand."""

import pytest

from jllama.lab.plan_program import (
    array_bytes,
    collectives,
    kernels,
    largest_buffers,
    launches,
    parse,
    traffic_bytes,
)

TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused (param_0: bf16[8,1024,64]) -> bf16[1024,64] {
  %param_0 = bf16[8,1024,64]{2,1,0} parameter(0)
  ROOT %slice = bf16[1024,64]{1,0} dynamic-slice(%param_0, %index), dynamic_slice_sizes={1,1024,64}
}

%all-reduce-scatter.1 (param_1: f32[64,128]) -> f32[16,128] {
  %input = f32[64,128]{1,0} parameter(0)
  ROOT %all-reduce.3 = f32[64,128]{1,0} all-reduce(%input), HALVES, to_apply=%add
}

%async_start (param_2: bf16[64,64]) -> bf16[128,64] {
  %param_2 = bf16[64,64]{1,0} parameter(0)
  ROOT %all-gather.7 = bf16[128,64]{1,0} all-gather(%param_2), GROUPS
}

%async_step (param_3: bf16[64,64]) -> bf16[128,64] {
  %param_3 = bf16[64,64]{1,0} parameter(0)
  ROOT %all-gather.8 = bf16[128,64]{1,0} all-gather(%param_3), GROUPS
}

%yes (param_4: f32[2]) -> f32[4] {
  ROOT %all-gather.9 = f32[4]{0} all-gather(%param_4), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%no (param_5: f32[2]) -> f32[2] {
  ROOT %param_5 = f32[2]{0} parameter(0)
}

%condition (state: (s32[], bf16[8,1024,64])) -> pred[] {
  %count = s32[] constant(32)
  ROOT %less = pred[] compare(%index, %count), direction=LT
}

%body (state: (s32[], bf16[8,1024,64])) -> (s32[], bf16[8,1024,64]) {
  %state = (s32[], bf16[8,1024,64]{2,1,0}) parameter(0)
  %stack = bf16[8,1024,64]{2,1,0} get-tuple-element(%state), index=1
  %part = bf16[1024,64]{1,0} fusion(%stack), kind=kLoop, calls=%fused
  %gathered = bf16[4096,64]{1,0} all-gather(%part), replica_groups=[2,4]<=[8], NAMED/gather"}
  %scattered = f32[16,128]{1,0} fusion(%gathered), kind=kCustom, calls=%all-reduce-scatter.1
  %begun = bf16[128,64]{1,0:S(1)} fusion(%close), kind=kCustom, calls=%async_start
  %done = bf16[128,64]{1,0:S(1)} fusion(%close), kind=kCustom, calls=%async_step
  ROOT %next = (s32[], bf16[8,1024,64]{2,1,0}) tuple(%index, %stack)
}

ENTRY %main (stack: bf16[8,1024,64]) -> f32[] {
  %stack.1 = bf16[8,1024,64]{2,1,0} parameter(0), STATE
  %both = ((f32[8], f32[4]), (f32[16], f32[8])) all-gather-start(%a, %b), PAIRS
  %copied = (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%c)
  %loop = (s32[], bf16[8,1024,64]{2,1,0}) while(%start), condition=%condition, body=%body
  %branch = f32[2] conditional(%p, %x, %x), true_computation=%yes, false_computation=%no
  ROOT %sum = f32[] all-reduce(%partial), replica_groups={}, to_apply=%add
}
"""
for name, text in {
    "GROUPS": 'replica_groups=[4,2]<=[2,4]T(1,0), frontend_attributes={chain_id="3"}',
    "HALVES": "replica_groups={{0,2,4,6},{1,3,5,7}}",
    "PAIRS": "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
    "NAMED": 'metadata={op_name="jit(step)',
    "STATE": "metadata={op_name=\"state.params[\\'layers\\'][\\'wq\\']\"}",
}.items():
    TEXT = TEXT.replace(name, text)


def test_bytes_of_arrays_and_tuples():
    assert array_bytes("bf16[4,8]{1,0:T(8,128)(2,1)}") == 64
    assert array_bytes("(f32[2]{0}, s4[8], pred[3], /*index=3*/f8e4m3fn[5])") == 8 + 4 + 3 + 5
    assert array_bytes("token[]") == 0


def test_collectives_are_counted_as_often_as_their_loop_runs():
    rows = {(row.kind, row.shape): row for row in collectives(parse(TEXT), node=4)}
    gathered, scattered = rows["all-gather", "bf16[4096,64]"], rows["reduce-scatter", "f32[64,128]"]
    summed = rows["all-reduce", "f32[]"]
    assert gathered[2:] == (4, 4, 32, 4096 * 64 * 2 * 3 / 4)
    assert scattered[2:] == (4, 2, 32, 16 * 128 * 4 * 3)  # devices 0, 2, 4 and 6, of two nodes
    assert summed[2:] == (8, 4, 1, 4 * 2 * 7 / 8)


def test_an_exchange_in_several_fusions_or_of_several_arrays_is_counted_once():
    rows = {row.shape: row for row in collectives(parse(TEXT), node=4)}
    assert rows["bf16[128,64]"][2:] == (2, 1, 32, 128 * 64 * 2 / 2)  # devices 0 and 4
    assert rows["f32[16], f32[8]"][2:] == (2, 2, 1, (16 + 8) * 4 / 2)
    assert rows["f32[4]"].times == 1  # in a branch
    assert len(rows) == 6


def test_traffic_is_of_slices_and_of_memory_alone():
    part, scattered, copied = 1024 * 64 * 2, 16 * 128 * 4, 400
    assert traffic_bytes(parse(TEXT)) == 32 * (2 * part + 4 * part + scattered) + copied


def test_launches_are_of_what_runs_beside_exchanges():
    assert launches(parse(TEXT)) == 32 * 4 + 1  # four fusions in each turn of the loop, and a copy


def test_largest_buffers_come_first_with_what_made_them():
    stack, gathered, *_ = largest_buffers(parse(TEXT))
    assert stack == (8 * 1024 * 64 * 2, "bf16[8,1024,64]", "state.params['layers']['wq']")
    assert gathered == (4096 * 64 * 2, "bf16[4096,64]", "gather")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("splash_mha_fwd", ["splash"]),
        ("mha_forward_kernel", ["triton"]),
        ("tokamax/_src", ["tokamax"]),
        ("%paged_attention.1 =", ["paged"]),
        ("", []),
    ],
)
def test_kernels_are_told_by_their_custom_calls(line, names):
    assert kernels(line) == names
