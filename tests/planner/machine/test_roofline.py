"""The roofline of handwritten programs, with bytes, FLOPs and seconds worked out by hand."""

import pytest

from jpipe_planner import Device
from jpipe_planner.machine.roofline import Rates, read_kernels

RATES = Rates(1e9, {"float32": 1e9, "bfloat16": 4e9}, 1e-6)  # GB/s and GFLOP/s


def kernels(text, rates=RATES):
    return {kernel.name: kernel for kernel in read_kernels(f"HloModule jit_f, is_scheduled=true\n\n{text}", rates)}


PRODUCT = """
%fused (p0: bf16[8,16], p1: f32[16,4]) -> bf16[8,4] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = f32[16,4]{1,0} parameter(1)
  %convert = bf16[16,4]{1,0} convert(%p1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%p0, %convert), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[8,16], w: f32[16,4]) -> bf16[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  %bitcast = bf16[8,16]{1,0} bitcast(%x)
  ROOT %gemm = bf16[8,4]{1,0} fusion(%bitcast, %w), kind=kCustom, calls=%fused
}
"""


def test_a_fused_product_reads_its_factors_and_writes_its_result():
    (gemm,) = kernels(PRODUCT).values()
    assert (gemm.name, gemm.kind, gemm.runs) == ("gemm", "product", 1)
    assert gemm.bytes == 2 * 8 * 16 + 4 * 16 * 4 + 2 * 8 * 4
    assert gemm.flops == 2 * 8 * 4 * 16
    assert gemm.seconds == pytest.approx(576 / 1e9 + 1e-6)  # 256 ns for the FLOPs in bfloat16
    slow = kernels(PRODUCT, Rates(1e9, {"bfloat16": 1e9}))["gemm"]
    assert slow.seconds == pytest.approx(1024 / 1e9)


def test_an_algorithm_says_in_which_dtype_a_product_is_computed():
    text = PRODUCT.replace("dot(%p0, %convert),", "dot(%p0, %convert), algorithm=dot_tf32_tf32_f32,")
    assert kernels(text)["gemm"].seconds == pytest.approx(1024 / 1e9 + 1e-6)


def test_rates_that_a_topology_leaves_out_are_those_of_the_target():
    known = Rates.of(Device(target="h100-80gb"))
    assert Rates.of(Device(target="h100-80gb", memory_bandwidth=None, flops={})) == known
    assert known.seconds(0, []) == 0  # no kernel
    assert known.seconds(1, []) > known.kernel_seconds > 0


def test_an_unknown_dtype_has_the_rate_of_one_of_its_size_or_the_highest():
    fast = Rates(1e12, {"float32": 1e9, "float16": 4e9, "float8_e4m3fn": 8e9})
    assert kernels(PRODUCT, fast)["gemm"].seconds == pytest.approx(1024 / 4e9)
    text = PRODUCT.replace("bf16[8,16]", "f64[8,16]")
    assert kernels(text, fast)["gemm"].seconds == pytest.approx(1024 / 8e9)


LOOP = """
%body (arg: (s32[], f32[100])) -> (s32[], f32[100]) {
  %arg = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[100]{0} get-tuple-element(%arg), index=1
  %negate = f32[100]{0} negate(%x)
  ROOT %tuple = (s32[], f32[100]{0}) tuple(%i, %negate)
}

%condition (arg: (s32[], f32[100])) -> pred[] {
  %arg = (s32[], f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %limit = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (arg: (s32[], f32[100])) -> (s32[], f32[100]) {
  %arg = (s32[], f32[100]{0}) parameter(0)
  ROOT %while = (s32[], f32[100]{0}) while(%arg), condition=%condition, body=%bodyKNOWN
}
"""


@pytest.mark.parametrize(("known", "direction", "runs"), [('"known_trip_count":{"n":"16"}', "LT", 16), ("", "LT", 7), ("", "NE", 1)])
def test_the_body_of_a_loop_counts_as_often_as_it_runs(known, direction, runs):
    text = LOOP.replace("KNOWN", f", backend_config={{{known}}}").replace("direction=LT", f"direction={direction}")
    (kernel,) = kernels(text).values()
    assert (kernel.name, kernel.runs, kernel.bytes) == ("negate", runs, 800)


SLICES = """
%fused (p0: f32[1000,10], p1: f32[10], p2: s32[]) -> f32[1000,10] {
  %p0 = f32[1000,10]{1,0} parameter(0)
  %p1 = f32[10]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,10]{1,0} dynamic-slice(%p0, %p2, %zero), dynamic_slice_sizes={1,10}
  %row = f32[1,10]{1,0} bitcast(%p1)
  %new = f32[1,10]{1,0} add(%old, %row)
  ROOT %update = f32[1000,10]{1,0} dynamic-update-slice(%p0, %new, %p2, %zero)
}

ENTRY %main (x: f32[1000,10], y: f32[10], i: s32[]) -> f32[5,10] {
  %x = f32[1000,10]{1,0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  %add_to_row = f32[1000,10]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused
  %ids = s32[5,1]{1,0} parameter(3)
  %add_rows = f32[1000,10]{1,0} scatter(%add_to_row, %ids, %rows), to_apply=%add
  %rows = f32[5,10]{1,0} parameter(4)
  ROOT %pick = f32[5,10]{1,0} gather(%add_rows, %ids), slice_sizes={1,10}
}
"""


def test_of_slices_only_the_slice_is_moved():
    found = kernels(SLICES)
    assert found["add_to_row"].bytes == 40 + 40 + 4 + 40
    assert found["add_rows"].bytes == 200 + 20 + 200 + 200
    assert found["pick"].bytes == 200 + 20 + 200


def test_an_array_that_is_sliced_and_read_counts_whole():
    text = SLICES.replace("%row = f32[1,10]{1,0} bitcast(%p1)", "%all = f32[] reduce(%p0, %p2)\n  %row = f32[1,10]{1,0} bitcast(%p1)")
    assert kernels(text)["add_to_row"].bytes == 40_000 + 40 + 4 + 40


CALLS = """
ENTRY %main (a: bf16[8,16], b: bf16[16,4]) -> bf16[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  %cublas = (bf16[8,4]{1,0}, s8[100]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q = bf16[2,32,4,8]{3,2,1,0} parameter(2)
  %k = bf16[2,64,4,8]{3,2,1,0} parameter(3)
  %attention = (bf16[2,32,4,8]{3,2,1,0}, f32[2,4,32]{2,1,0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","32","64"]},"mask_type":"NO_MASK"}}
  ROOT %gradient = (bf16[2,32,4,8]{3,2,1,0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","32","64"]},"mask_type":"CAUSAL"}}
}
"""  # noqa: E501


def test_products_of_libraries_count_by_their_shapes():
    found = kernels(CALLS)
    assert found["cublas"].flops == 2 * 8 * 4 * 16
    assert found["cublas"].bytes == 2 * 8 * 16 + 2 * 16 * 4 + 2 * 8 * 4 + 100
    scores = 2 * 4 * 32 * 64
    assert found["attention"].flops == 2 * scores * 8 * 2
    assert found["attention"].bytes == 2 * (4096 // 2 + 4096 + 4096 // 2) + 4 * 256  # keys and values are one array here, read once
    assert found["gradient"].flops == 2 * scores * 8 * 5 / 2


SPLASH = """
ENTRY %main (q: bf16[2,4,256,64], k: bf16[2,2,256,64], i: s32[2,256,128]) -> bf16[2,4,256,64] {
  %q = bf16[2,4,256,64]{3,2,1,0} parameter(0)
  %k = bf16[2,2,256,64]{3,2,1,0} parameter(1)
  %i = s32[2,256,128]{2,1,0} parameter(2)
  %splash_mha_fwd_segmented_residuals.1 = (bf16[2,4,256,64]{3,2,1,0}, f32[2,4,256,128]{3,2,1,0}) custom-call(%i, %q, %k, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":{}}}
  %splash_mha_dkv_segmented_no_residuals.1 = (bf16[2,2,256,64]{3,2,1,0}, bf16[2,2,256,64]{3,2,1,0}) custom-call(%i, %q, %k, %k), custom_call_target="tpu_custom_call"
  %splash_mha_dq_segmented_no_residuals.1 = bf16[2,4,256,64]{3,2,1,0} custom-call(%i, %q, %k, %k), custom_call_target="tpu_custom_call"
  ROOT %other = bf16[2,4,256,64]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def test_splash_attention_counts_as_causal_and_in_the_dtype_of_its_results():
    found = kernels(SPLASH)
    pairs = 2 * 4 * 256 * 256 // 2
    names = ("fwd_segmented", "dq_segmented_no", "dkv_segmented_no")
    assert [found[f"splash_mha_{name}_residuals.1"].flops for name in names] == [2 * pairs * 64 * products for products in (2, 3, 4)]
    assert found["other"].flops == 0
    of_fwd = found["splash_mha_fwd_segmented_residuals.1"]
    assert of_fwd.bytes == 2 * (2 * 4 + 2 * 2 + 2 * 4) * 256 * 64 + 4 * (2 * 256 * 128 + 2 * 4 * 256 * 128)


OF_A_TPU = """
ENTRY %main (a: bf16[4,16,100,64], b: bf16[4,16,64,100], c: f32[3,100]) -> f32[4,16,100,100] {
  %a = bf16[4,16,100,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,16,64,100]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[3,100]{1,0:T(4,128)} parameter(2)
  %start = (bf16[4,16,64,100]{3,2,1,0:T(8,128)(2,1)S(1)}, bf16[4,16,64,100]{3,2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %half = ((f32[3,100]{1,0:T(4,128)}), f32[1,100]{1,0:T(4,128)S(1)}, s32[]{:S(2)}) slice-start(%c), slice={[0:1], [0:100]}
  %done = bf16[4,16,64,100]{3,2,1,0:T(8,128)(2,1)S(1)} copy-done(%start)
  %product = bf16[4,16,100,100]{3,2,1,0:T(8,128)(2,1)S(1)} convolution(%a, %done), window={size=4x16 stride=3x15 lhs_dilate=4x16}, dim_labels=01bf_01io->01bf
  %again = bf16[4,16,100,100]{3,2,1,0:T(8,128)(2,1)S(1)} add(%product, %done)
  %half-done = f32[1,100]{1,0:T(4,128)S(1)} slice-done(%half)
  %joined = f32[1,100]{1,0:T(4,128)S(1)} custom-call(%half-done), custom_call_target="ConcatBitcast"
  %sum = f32[1,100]{1,0:T(4,128)S(1)} negate(%joined)
  ROOT %out = (f32[1,100]{1,0:T(4,128)}, f32[1,100]{1,0:T(4,128)S(1)}, u32[]{:S(2)}) copy-start(%sum)
}
"""  # noqa: E501


def test_a_tpu_moves_whole_tiles_and_reads_fast_memory_for_nothing():
    found = kernels(OF_A_TPU)
    assert found["product"].flops == 2 * 4 * 16 * 100 * 100 * 64
    assert found["product"].bytes == 2 * 64 * 104 * 128 + 2 * 64 * 64 * 128  # with what was moved ahead for it
    assert found["again"].bytes == 0
    assert found["sum"].bytes == 4 * 4 * 128
    assert found["out"].bytes == 4 * 4 * 128
    assert list(found) == ["product", "again", "sum", "out"]


CONVOLUTION = """
ENTRY %main (x: f32[1,5,2], k: f32[3,2,6]) -> f32[1,5,6] {
  %x = f32[1,5,2]{2,1,0} parameter(0)
  %k = f32[3,2,6]{2,1,0} parameter(1)
  ROOT %conv = f32[1,5,6]{2,1,0} convolution(%x, %k), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
}
"""


def test_a_convolution_counts_pairs_inside_the_image():
    assert kernels(CONVOLUTION)["conv"].flops == 2 * (2 + 3 + 3 + 3 + 2) * 2 * 6


def test_of_a_conditional_the_longest_branch_counts():
    branch = "%{0} (p: f32[{1}]) -> f32[{1}] {{\n  %p = f32[{1}]{{0}} parameter(0)\n  ROOT %{0}_work = f32[{1}]{{0}} negate(%p)\n}}\n"
    main = (
        "ENTRY %main (i: s32[]) -> f32[10] {\n  %i = s32[] parameter(0)\n"
        "  ROOT %choice = f32[10]{0} conditional(%i, %i, %i), branch_computations={%short, %long}\n}\n"
    )
    assert list(kernels(branch.format("short", 10) + branch.format("long", 20) + main)) == ["long_work"]


TABLES = """HloModule jit_f, is_scheduled=true

FileNames
1 "/app/model.py"
2 "/lib/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "call"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
3 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%fused (p: f32[10]) -> f32[10] {
  %p = f32[10]{0} parameter(0)
  ROOT %work = f32[10]{0} negate(%p), metadata={op_name="jit(f)/neg" stack_frame_id=2}
}

ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %in_flax = f32[10]{0} negate(%x), metadata={op_name="jit(f)/linear/neg" stack_frame_id=3}
  %inside = f32[10]{0} fusion(%x), kind=kLoop, calls=%fused
  %older = f32[10]{0} negate(%x), metadata={op_name="jit(f)/old" source_file="/app/old.py" source_line=7}
  ROOT %unknown = f32[10]{0} negate(%x)
}
"""


def test_a_kernel_names_the_innermost_line_outside_the_libraries():
    found = {kernel.name: (kernel.source, kernel.op_name) for kernel in read_kernels(TABLES, RATES)}
    assert found == {
        "in_flax": ("/app/model.py:12", "jit(f)/linear/neg"),
        "inside": ("/app/model.py:12", "jit(f)/neg"),
        "older": ("/app/old.py:7", "jit(f)/old"),
        "unknown": ("", ""),
    }


def test_the_rates_are_those_of_the_target_or_of_the_topology():
    rates = Rates.of(Device(target="h100-80gb"))
    assert (rates.bandwidth, rates.flops["bfloat16"], rates.kernel_seconds) == (
        pytest.approx(3.35232e12),
        pytest.approx(0.45 * 989e12),
        2e-6,
    )
    slower = Rates.of(Device(target="v5e", efficiency=0.25, memory_bandwidth=1e9))
    assert (slower.bandwidth, slower.flops["bfloat16"], slower.kernel_seconds) == (1e9, pytest.approx(0.25 * 197e12), 0.0)
