# Copyright 2026 The tba_jax Authors.
# SPDX-License-Identifier: Apache-2.0
"""Costs of compiled programs, from excerpts of what XLA printed for v5e."""

import pathlib

from absl.testing import parameterized

from tba_jax.system import hlo

# A loop of 16 layers: its products stand in fusions, one of them with an
# asynchronous all-gather that is repeated under its channel.
_LOOP = (pathlib.Path(__file__).parent / "loop.hlo.txt").read_text()
_PRODUCT_FLOPS = 2 * 32 * 64 * 128
_GATHERED = 64 * 8 * 2 * 15


def _entry(*lines: str) -> str:
  body = "".join(f"  {line}\n" for line in lines)
  return f"HloModule jit_f\n\nENTRY %main (p: f32[2]) -> f32[2] {{\n{body}}}\n"


class HloTest(parameterized.TestCase):

  def test_loop_body_counts_once_per_iteration(self):
    result = hlo.costs(_LOOP)
    self.assertEqual(result.flops, 16 * _PRODUCT_FLOPS)
    self.assertEqual(
        result.collectives,
        {
            "all-gather": 16 * _GATHERED,
            "all-reduce": 16 * 2 * 16 * 10 * 4 * 3 / 4,
        },
    )

  @parameterized.parameters(
      # Decided while it runs.
      ("compare(%counter.2, %constant.549)", "and(%counter.2, %counter.2)", 1),
      (
          "body=%body",
          'body=%body, backend_config={"known_trip_count":{"n":"5"}}',
          5,
      ),
      # An unrolled body, as XLA makes of products that overlap with gathers.
      (
          "ROOT %tuple.1 = (s32[]{:T(128)}, bf16[64,8]{1,0}, bf16[32,128]{1,0})"
          " tuple(%counter,",
          "%two = s32[]{:T(128)} constant(2)\n"
          "  %next = s32[]{:T(128)} add(%counter, %two)\n"
          "  ROOT %tuple.1 = (s32[], bf16[64,8], bf16[32,128]) tuple(%next,",
          8,
      ),
  )  # fmt: skip
  def test_counts_trips_of_loop(self, old, new, trips):
    result = hlo.costs(_LOOP.replace(old, new))
    self.assertEqual(result.flops, trips * _PRODUCT_FLOPS)
    # The caller may know the trips that a loop decides.
    result = hlo.costs(_LOOP.replace(old, new), trips=7)
    trips = 7 if trips == 1 else trips
    self.assertEqual(result.flops, trips * _PRODUCT_FLOPS)

  def test_attributes_of_kernel_may_continue_over_lines(self):
    kernel = (
        "  %kernel.1 = f32[8]{0} custom-call(%q.1),"
        ' frontend_attributes={kernel_metadata={\n"block": 128\n}}, x={}\n'
    )
    root = "  ROOT %tuple.1 ="
    self.assertIn(root, _LOOP)
    result = hlo.costs(_LOOP.replace(root, kernel + root))
    self.assertEqual(result.flops, 16 * _PRODUCT_FLOPS)

  @parameterized.parameters(("fwd", 2), ("dq", 3), ("dkv", 4), ("other", 0))
  def test_counts_products_of_splash_attention(self, kernel, num_products):
    result = hlo.costs(
        _entry(
            "%mask = s8[3,8,8]{2,1,0} parameter(0)",
            "%q = bf16[3,8,512,64]{3,2,1,0} parameter(1)",
            "%k = bf16[3,2,768,64]{3,2,1,0} parameter(2)",
            f"%splash_mha_{kernel}_segmented_residuals.6 ="
            " (f32[3,512,128]{2,1,0}, bf16[3,8,512,64]{3,2,1,0})"
            " custom-call(%mask, %q, %k, /*index=3*/%k),"
            ' custom_call_target="tpu_custom_call"',
        )
    )
    # The last 512 of 768 tokens, which see the 256 before and themselves.
    pairs = 3 * 8 * (512 * 256 + 512 * 513 // 2)
    self.assertEqual(result.flops, 2 * num_products * pairs * 64)

  @parameterized.parameters(
      # The name of a kernel is the instruction's on TPU, a scope's on GPU.
      ("ragged-dot-none", "", "96,32", "7,64,32", "96,64"),
      ("ragged-dot-none", "", "96,64", "7,64,32", "96,32"),
      ("tgmm", "", "64,96", "96,32", "7,64,32"),
      ("call", "grouped_products", "96,32", "7,64,32", "96,64"),
      ("call", "grouped_sums", "96,64", "96,32", "7,64,32"),
      ("other", "", "96,32", "7,64,32", "96,64"),
  )
  def test_counts_products_of_runs_of_rows(self, kernel, scope, lhs, rhs, out):
    text = _entry(
        "%sizes = s32[7]{0} parameter(0)",
        f"%lhs = bf16[{lhs}] parameter(1)",
        f"%rhs = bf16[{rhs}] parameter(2)",
        f"ROOT %{kernel}.2 = bf16[{out}] custom-call(%sizes, %lhs, %rhs),"
        ' custom_call_target="tpu_custom_call",'
        f' metadata={{op_name="jit(f)/{scope}/pallas_call"}}',
    )
    flops = 0 if kernel == "other" else 2 * 96 * 64 * 32
    self.assertEqual(hlo.costs(text).flops, flops)

  def test_counts_products_and_bytes_of_cublas(self):
    text = _entry(
        "%p = bf16[8,64,16]{2,1,0} parameter(0)",
        "%q = bf16[8,16,32]{2,1,0} parameter(1)",
        "ROOT %c = (bf16[8,64,32]{2,1,0}, s8[33554432]{0})"
        ' custom-call(%p, %q), custom_call_target="__cublas$lt$matmul",'
        ' backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]'
        "}}}",
    )
    result = hlo.costs(text)
    self.assertEqual(result.flops, 2 * 8 * 64 * 16 * 32)
    # The workspace is neither read nor kept.
    self.assertEqual(result.memory_bytes, 2 * 8 * (64 * 16 + 16 * 32 + 64 * 32))
    self.assertEqual(hlo.kernels(text), {"cublas$lt$matmul": 1})

  @parameterized.parameters(
      # The name of a kernel is the instruction's on TPU, a scope's on GPU.
      ("ragged_decode_attention.2", "tpu_custom_call", "while/body", 1),
      ("pallas_call.2", "__gpu$xla.gpu.triton",
       "while/body/ragged_decode_attention/jit(mqa)", 1),
      ("pallas_call.2", "__gpu$xla.gpu.triton", "while/body/jit(mqa)", 0),
  )  # fmt: skip
  def test_distinguishes_ragged_attention_caches(
      self, name, target, scope, is_ragged
  ):
    text = _entry(
        "%start = s32[4]{0} parameter(0)",
        "%q = bf16[4,16,64]{2,1,0} parameter(1)",
        "%k = bf16[4,128,64]{2,1,0} parameter(2)",
        "%v = bf16[4,128,64]{2,1,0} parameter(3)",
        f"ROOT %{name} = bf16[4,16,64]{{2,1,0}} custom-call(%start, %q, %k,"
        f' %v), custom_call_target="{target}", metadata={{op_name="{scope}"}}',
    )
    result = hlo.costs(text)
    caches = 2 * 4 * 128 * 64 * 2
    self.assertEqual(result.memory_bytes, 4 * 4 + 2 * 4 * 16 * 64 * 2 + caches)
    self.assertEqual(result.cache_bytes, is_ragged * caches)

  @parameterized.parameters(("", 2), ("Backward", 5))
  def test_counts_products_of_cudnn_attention(self, suffix, num_products):
    result = hlo.costs(
        _entry(
            "%q = bf16[3,96,8,64]{3,2,1,0} parameter(0)",
            "%k = bf16[3,96,2,64]{3,2,1,0} parameter(1)",
            "ROOT %c = (bf16[3,8,96,64]{3,1,2,0}, u8[0]{0})"
            " custom-call(%q, %k, %k),"
            f' custom_call_target="__cudnn$fmhaSoftmax{suffix}"',
        )
    )
    pairs = 3 * 8 * (96 * 97 // 2)
    self.assertEqual(result.flops, 2 * num_products * pairs * 64)

  def test_names_kernels(self):
    text = _entry(
        "%splash_mha_fwd.6 = f32[2] custom-call(%p), custom_call_target="
        '"tpu_custom_call"',
        "%splash_mha_fwd.7 = f32[2] custom-call(%p), custom_call_target="
        '"tpu_custom_call"',
        'ROOT %c = f32[2] custom-call(%p), custom_call_target="__cudnn$norm"',
    )
    self.assertEqual(hlo.kernels(text), {"cudnn$norm": 1, "splash_mha_fwd": 2})

  def test_gather_after_loop_is_counted_once(self):
    begun = (
        "  %fusion.9 = (bf16[64,8]{1,0}, bf16[64,128]{1,0}, u32[]{:S(2)})"
        " fusion(%p.2), kind=kCustom, calls=%fused_computation.1\n"
    )
    result = hlo.costs(_LOOP.replace("  %tuple.2 =", begun + "  %tuple.2 ="))
    self.assertEqual(result.collectives["all-gather"], _GATHERED)

  @parameterized.parameters(
      ("all-gather(%p)", "replica_groups={{0,1,2,3},{4,5,6,7}}", 3 * 400),
      ("reduce-scatter(%p)", "replica_groups=[2,4]<=[8]", 400 * 3 / 4),
      ("all-to-all(%p)", "replica_groups=[2,4]<=[8]", 400 * 3 / 4),
      ("all-reduce(%p)", "replica_groups=[1,8]<=[8]", 2 * 400 * 7 / 8),
      (
          "collective-permute-start(%p, %q)",
          "source_target_pairs={{0,1},{1,0}}",
          400,
      ),
      (
          "all-reduce(%p)",
          "replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}",
          2 * 400 * 3 / 4,
      ),
  )
  def test_bytes_received(self, call, groups, expected):
    text = _entry(
        "%p = f32[10,10]{1,0} parameter(0)",
        "%q = f32[10,10]{1,0} parameter(1)",
        f"ROOT %c = f32[10,10]{{1,0}} {call}, channel_id=1, {groups}",
    )
    self.assertEqual(hlo.costs(text).collective_bytes, expected)

  @parameterized.parameters(
      # Within hosts of 4, over all devices of 2 hosts, one device of each host.
      ("all-gather(%p)", "replica_groups=[2,4]<=[8]", 0),
      ("all-gather(%p)", "replica_groups=[1,8]<=[8]", 7 * 400 / 4),
      ("all-gather(%p)", "replica_groups=[4,2]<=[2,4]T(1,0)", 400),
      ("all-gather(%p)", "replica_groups={{0,1,4,5},{2,3,6,7}}", 1200 / 2),
      ("all-reduce(%p)", "replica_groups=mesh['a'=2,'b'=4] {'a'}", 400),
      ("all-reduce(%p)", "replica_groups=mesh['a'=2,'b'=4] {'b'}", 0),
      (
          "all-reduce(%p)",
          "replica_groups=mesh['a'=8] {'a':(1)4}",
          2 * 400 * 3 / 4 / 2,
      ),
      ("all-to-all(%p)", "replica_groups=[1,8]<=[8]", 400 * 4 / 8),
      ("collective-permute(%p)", "source_target_pairs={{0,1},{1,0}}", 0),
      ("collective-permute(%p)", "source_target_pairs={{0,1},{3,4}}", 400),
  )
  def test_bytes_received_from_other_hosts(self, call, groups, expected):
    text = _entry(
        "%p = f32[10,10]{1,0} parameter(0)",
        f"ROOT %c = f32[10,10]{{1,0}} {call}, channel_id=1, {groups}",
    )
    self.assertAlmostEqual(hlo.costs(text, 4).network_bytes, expected)
    self.assertEqual(hlo.costs(text).network_bytes, 0)

  def test_reduce_scatter_of_tpus(self):
    fused = (
        "%all-reduce-scatter.7 (p: bf16[64,8]) -> bf16[64,1] {\n"
        "  %p = bf16[64,8]{0,1:T(8,128)(2,1)S(1)} parameter(0)\n"
        "  %sum = bf16[64,8]{0,1} all-reduce(%p), channel_id=80,"
        " replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add\n"
        "  ROOT %slice = bf16[64,1]{0,1} dynamic-slice(%sum, %p, %p),"
        " dynamic_slice_sizes={64,1}\n}\n\n"
    )
    text = fused + _entry(
        "%p = bf16[64,8]{0,1} parameter(0)",
        "ROOT %c = bf16[64,1]{0,1} fusion(%p), kind=kCustom,"
        " calls=%all-reduce-scatter.7",
    )
    self.assertEqual(
        hlo.costs(text).collectives, {"reduce-scatter": 2 * 64 * 8 * 7 / 8}
    )

  @parameterized.parameters(
      # Products of a batch of 8 matrices, in the batch's place a window.
      (
          "bf16[64,4,8]", "bf16[8,5,4]", "bf16[64,5,8]", "convolution",
          "window={size=8 stride=7 pad=0_0 lhs_dilate=8},"
          " dim_labels=bf0_0oi->bf0",
          2 * 64 * 8 * 4 * 5,
      ),
      # Heads of a projection.
      (
          "bf16[64,16]", "bf16[16,32]", "bf16[64,32]", "dot",
          "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
          2 * 64 * 16 * 32,
      ),
      (
          "bf16[64,1,16]", "bf16[8,4,16]", "bf16[8,64,4]", "convolution",
          "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0oi->0bf",
          2 * 64 * 16 * 8 * 4,
      ),
  )  # fmt: skip
  def test_counts_flops(self, lhs, rhs, out, opcode, attributes, expected):
    text = _entry(
        f"%p = {lhs}{{1,0}} parameter(0)",
        f"%q = {rhs}{{1,0}} parameter(1)",
        f"ROOT %c = {out}{{1,0}} {opcode}(%p, %q), {attributes}",
    )
    self.assertEqual(hlo.costs(text).flops, expected)

  @parameterized.parameters(
      # Heads of 64 fill half of the lanes; what is in fast memory is free.
      ("copy(%wide)", "bf16[8,64]{1,0:T(8,128)(2,1)}", 8 * 128 * 2 * 2),
      ("copy(%fast)", "bf16[8,64]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
      ("dynamic-slice(%p, %i)", "f32[2,10]{1,0}", 2 * 80),
      ("dynamic-update-slice(%p, %row, %i)", "f32[10,10]{1,0}", 2 * 40),
      ("add(%p, %p)", "f32[10,10]{1,0}", 3 * 400),
      ("tuple(%p, %p)", "(f32[10,10], f32[10,10])", 0),
      ("copy-start(%p)", "(f32[10,10]{1,0}, f32[10,10]{1,0}, u32[])", 800),
      (
          "all-gather-start(%p, %row)",
          "((f32[10,10], f32[1,10]), (f32[20,10], f32[2,10]))",
          400 + 40 + 800 + 80,
      ),
      ("all-reduce-start(%p)", "f32[10,10]", 2 * 400),
      (
          "slice-start(%p)",
          "((f32[10,10]{1,0}), f32[2,10]{1,0:T(8,128)S(1)}, s32[]{:S(2)})",
          8 * 128 * 4,
      ),
      # Reads a row and an index, and writes the row in place.
      ("fusion(%p, %row, %i), kind=kLoop, calls=%update", "f32[10,10]", 84),
      # Uses what it reads twice, and does not use the row.
      ("fusion(%p, %row), kind=kLoop, calls=%all", "f32[10,10]", 2 * 400),
      # The fusion inside it reads a row.
      ("fusion(%p, %i), kind=kOutput, calls=%outer", "f32[1,10]", 40 + 4 + 40),
  )
  def test_counts_bytes_of_memory(self, call, result, expected):
    fused = (
        "%update (a: f32[10,10], b: f32[1,10], c: s32[]) -> f32[10,10] {\n"
        "  %a = f32[10,10]{1,0} parameter(0)\n"
        "  %b = f32[1,10]{1,0} parameter(1)\n"
        "  %c = s32[] parameter(2)\n"
        "  ROOT %u = f32[10,10]{1,0} dynamic-update-slice(%a, %b, %c, %c)\n"
        "}\n\n"
        "%inner (c: s32[], a: f32[10,10]) -> f32[1,10] {\n"
        "  %c = s32[] parameter(0)\n"
        "  %a = f32[10,10]{1,0} parameter(1)\n"
        "  ROOT %s = f32[1,10]{1,0} dynamic-slice(%a, %c, %c)\n"
        "}\n\n"
        "%outer (a: f32[10,10], c: s32[]) -> f32[1,10] {\n"
        "  %a = f32[10,10]{1,0} parameter(0)\n"
        "  %c = s32[] parameter(1)\n"
        "  ROOT %f = f32[1,10]{1,0} fusion(%c, %a), kind=kLoop, calls=%inner\n"
        "}\n\n"
        "%all (a: f32[10,10], b: f32[1,10]) -> f32[10,10] {\n"
        "  %a = f32[10,10]{1,0} parameter(0)\n"
        "  %b = f32[1,10]{1,0} parameter(1)\n"
        "  ROOT %m = f32[10,10]{1,0} multiply(%a, %a)\n"
        "}\n\n"
    )
    text = fused + _entry(
        "%p = f32[10,10]{1,0} parameter(0)",
        "%row = f32[1,10]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%wide = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(3)",
        "%fast = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(4)",
        f"ROOT %c = {result} {call}",
    )
    self.assertEqual(hlo.costs(text).memory_bytes, expected)

  def test_memory_is_counted_as_often_as_loop_runs(self):
    once, twice = (
        hlo.costs(_LOOP.replace("constant(16)", f"constant({n})")).memory_bytes
        for n in (16, 32)
    )
    self.assertGreater(once, 0)
    self.assertAlmostEqual(twice, 2 * once, delta=0.1 * once)

  def test_conditional_counts_as_its_most_expensive_branch(self):
    branch = (
        "%{name} (p: f32[10,10]) -> f32[10,10] {{\n"
        "  %p = f32[10,10]{{1,0}} parameter(0)\n"
        "  ROOT %d = f32[10,10]{{1,0}} {call}\n}}\n\n"
    )
    text = (
        branch.format(name="a", call="dot(%p, %p), lhs_contracting_dims={1}")
        + branch.format(name="b", call="add(%p, %p)")
        + _entry(
            "%p = f32[10,10]{1,0} parameter(0)",
            "%i = s32[] parameter(1)",
            "ROOT %c = f32[10,10]{1,0} conditional(%i, %p, %p),"
            " branch_computations={%a, %b}",
        )
    )
    self.assertEqual(hlo.costs(text).flops, 2 * 10**3)
