//! Mutation tests: small mistakes in the kernels' source; each must be detected.

mod subjects;

use tch::{Kind, Tensor};

use super::program::{self, PRELUDE, Program};
use subjects::{KernelCase, Seen};

/// A mistake: a text and its replacement.
struct Mutation {
    what: &'static str,
    /// Of the prelude, not of the kernel's own file.
    in_prelude: bool,
    from: &'static str,
    to: &'static str,
    /// How it is detected: a part of the fault's message (alternatives separated by a bar), or one of the ways below.
    noticed: &'static str,
    case: KernelCase,
}

/// The result has other bits than the original kernel's.
const OTHER_BITS: &str = "other bits";
/// Accesses touch more sectors than they should.
const SECTORS: &str = "sectors";
/// The original kernel accesses a row that does not exist, and the mutated kernel another address.
const OTHER_PLACE: &str = "other place";

macro_rules! mutation {
    ($what:literal, $from:literal => $to:literal, $noticed:expr, $case:expr) => {
        Mutation { what: $what, in_prelude: false, from: $from, to: $to, noticed: $noticed, case: $case }
    };
    (prelude $what:literal, $from:literal => $to:literal, $noticed:expr, $case:expr) => {
        Mutation { what: $what, in_prelude: true, from: $from, to: $to, noticed: $noticed, case: $case }
    };
}

fn mutations() -> Vec<Mutation> {
    vec![
        mutation!(prelude "a sum's barrier is missing",
            "part[threadIdx.x >> 5] = v;\n  __syncthreads();\n  return warp_sum" => "part[threadIdx.x >> 5] = v;\n  return warp_sum",
            "a race|never written", subjects::FORWARD),
        mutation!(prelude "a sum's barrier is in a branch",
            "part[threadIdx.x >> 5] = v;\n  __syncthreads();\n  return warp_sum" => "part[threadIdx.x >> 5] = v;\n  if (threadIdx.x < 40) __syncthreads();\n  return warp_sum",
            "a barrier that lanes", subjects::FORWARD),
        mutation!(prelude "a barrier that whole warps do not reach",
            "part[threadIdx.x >> 5] = v;\n  __syncthreads();\n  return warp_sum" => "part[threadIdx.x >> 5] = v;\n  if (threadIdx.x < 64) __syncthreads();\n  return warp_sum",
            "a barrier|a race", subjects::FORWARD),
        mutation!("scratch is used again without a barrier",
            "phase ^= 1) {\n    const i64 base = (i64)row * width;\n    if constexpr" => "phase ^= 0) {\n    const i64 base = (i64)row * width;\n    if constexpr",
            "a race", subjects::FORWARD),
        mutation!("backward's scratch is used again",
            "phase ^= 1) {\n    const i64 base = (i64)row * width;\n    const float r" => "phase ^= 0) {\n    const i64 base = (i64)row * width;\n    const float r",
            "a race", subjects::BACKWARD),
        mutation!("the copies of a row are not waited for",
            "wait_for_copies<STAGES - 1>();\n    }\n    float f[VECS][W];" => "}\n    float f[VECS][W];",
            "never written", subjects::FORWARD),
        mutation!("one group of copies too many is on its way",
            "wait_for_copies<STAGES - 1>();\n    }\n    float f[KEPT][W], d" => "wait_for_copies<STAGES>();\n    }\n    float f[KEPT][W], d",
            "never written", subjects::BACKWARD),
        mutation!("the copies of a row are no group",
            "        above.copy(row, stage * STAGE + Input::BYTES, k);\n      }\n      commit_copies();" => "        above.copy(row, stage * STAGE + Input::BYTES, k);\n      }",
            "never written", subjects::BACKWARD),
        mutation!("the next row is copied to the stage of this one",
            "begin(row + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);\n      wait_for_copies<STAGES - 1>();\n    }\n    float f[VECS][W];" => "begin(row + (STAGES - 1) * gridDim.x, stage);\n      wait_for_copies<STAGES - 1>();\n    }\n    float f[VECS][W];",
            "a race", subjects::FORWARD),
        mutation!("a later row is copied to a stage that is not read yet",
            "begin(row + (STAGES - 1) * gridDim.x, stage == 0 ? STAGES - 1 : stage - 1);\n      wait_for_copies<STAGES - 1>();\n    }\n    float f[KEPT][W], d" => "begin(row + (STAGES - 1) * gridDim.x, stage == STAGES - 1 ? 0 : stage + 1);\n      wait_for_copies<STAGES - 1>();\n    }\n    float f[KEPT][W], d",
            "a race", subjects::BACKWARD),
        mutation!("the ring does not turn",
            "    if constexpr (STAGES > 0) stage = stage == STAGES - 1 ? 0 : stage + 1;\n    float s = 0.f, products" => "    float s = 0.f, products",
            "a race", subjects::BACKWARD),
        mutation!("a stage has no room for the second matrix",
            "residual ? 2 * Input::BYTES : Input::BYTES;" => "Input::BYTES;",
            "a race", subjects::FORWARD_WITH_RESIDUAL),
        mutation!("two threads share a place of the ring",
            "word) * THREADS + threadIdx.x) * 16;" => "word) * THREADS + threadIdx.x / 2) * 16;",
            "a race", subjects::FORWARD),
        mutation!("more stages than the launch has memory for",
            "for (int s = 0; s < STAGES - 1; s++) begin(blockIdx.x + s * gridDim.x, s);\n  // A thread" => "for (int s = 0; s < STAGES - 1; s++) begin(blockIdx.x + s * gridDim.x, s + STAGES);\n  // A thread",
            "out of bounds", subjects::FORWARD),
        mutation!("a row beyond the last is copied",
            "if (row >= rows || (threadIdx.x + k * THREADS) * W >= width) continue;\n        input.copy(row, stage * stage_bytes" => "if ((threadIdx.x + k * THREADS) * W >= width) continue;\n        input.copy(row, stage * stage_bytes",
            "out of bounds", subjects::FORWARD),
        mutation!(prelude "one partial sum too many",
            "return warp_sum((threadIdx.x & 31) < THREADS / 32 ?" => "return warp_sum((threadIdx.x & 31) <= THREADS / 32 ?",
            "a race|never written|out of bounds", subjects::FORWARD),
        mutation!(prelude "a wrong mask of lanes",
            "v += __shfl_xor_sync(0xffffffffu" => "v += __shfl_xor_sync(0x0000ffffu",
            "the mask", subjects::FORWARD),
        mutation!(prelude "a shuffle for part of a warp",
            "if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;\n  __syncthreads();\n  return warp_sum((threadIdx.x & 31) < THREADS / 32 ? part[threadIdx.x & 31] : F(0));" => "if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;\n  __syncthreads();\n  if ((threadIdx.x & 31) < 7) v = warp_sum(v);\n  return v;",
            "the mask", subjects::FORWARD),
        mutation!(prelude "one step of a sum is missing",
            "for (int o = 16; o; o >>= 1) v += " => "for (int o = 8; o; o >>= 1) v += ",
            OTHER_BITS, subjects::FORWARD),
        mutation!("an index one too far",
            "if (row >= rows || (threadIdx.x + k * THREADS) * W >= width) continue;\n        input.copy(row, stage * stage_bytes" => "if (row >= rows || (threadIdx.x + k * THREADS) * W > width) continue;\n        input.copy(row, stage * stage_bytes",
            "out of bounds", subjects::FORWARD),
        mutation!("a tail that is dropped",
            "row < rows; row += gridDim.x, phase ^= 1) {\n    const i64 base = (i64)row * width;\n    if constexpr" => "row + 1 < rows; row += gridDim.x, phase ^= 1) {\n    const i64 base = (i64)row * width;\n    if constexpr",
            "never written", subjects::FORWARD),
        mutation!("two blocks write one place",
            "of_weight + (i64)blockIdx.x * width + i" => "of_weight + i",
            "a race", subjects::BACKWARD),
        mutation!("every thread writes a row's statistic",
            "if (threadIdx.x == 0) {\n      rstd[row] = r;" => "if (threadIdx.x < 2) {\n      rstd[row] = r;",
            "a race", subjects::FORWARD),
        mutation!("a gradient's parts are not added up",
            "sums[k][j] = fmaf(d[at][j], f[at][j], sums[k][j]);" => "sums[k][j] = d[at][j] * f[at][j];",
            OTHER_BITS, subjects::BACKWARD),
        mutation!("two threads share a sum in shared memory",
            "[(k * W + j) * THREADS + threadIdx.x];" => "[(k * W + j) * THREADS + threadIdx.x / 2];",
            "a race", subjects::BACKWARD_OF_WIDE_ROWS),
        mutation!("what is read again is not scaled",
            "f[at][j] = (f[at][j] - center) * r;\n          if (weight) d" => "f[at][j] = f[at][j] - center;\n          if (weight) d",
            OTHER_BITS, subjects::BACKWARD_OF_WIDE_ROWS),
        mutation!("columns are summed without a barrier",
            "part[warp][lane] = s;\n  __syncthreads();" => "part[warp][lane] = s;",
            "a race|never written", subjects::SUMS),
        mutation!("a column's last part is not read",
            "for (int i = 1; i < 8; i++) all" => "for (int i = 1; i < 7; i++) all",
            OTHER_BITS, subjects::SUMS),
        mutation!("columns are summed with a stride",
            "column = (blockIdx.x - is_second * blocks) * 32 + lane;" => "column = lane * 3 + blockIdx.x - is_second * blocks;",
            SECTORS, subjects::SUMS),
        mutation!("the second matrix is read for the first",
            "is_second ? second : first" => "is_second ? first : second",
            OTHER_BITS, subjects::SUMS),
        mutation!("a column beyond the last",
            "if (column < width) {\n    _Pragma" => "{\n    _Pragma",
            "out of bounds", subjects::SUMS),
        mutation!(prelude "a maximum that drops NaN",
            "max.NaN.f32 %0" => "max.f32 %0",
            OTHER_BITS, subjects::STATISTICS_WITH_NAN),
        mutation!("an impossible row's reference is −∞",
            "return m == -infinity() ? 0.f : m;" => "return m;",
            OTHER_BITS, subjects::IMPOSSIBLE_ROWS),
        mutation!("equal maxima: the last one",
            "v == value && c < column" => "v == value && c > column",
            OTHER_BITS, subjects::BEST),
        mutation!("the best columns are read without a barrier",
            "bests[threadIdx.x >> 5] = top_column;\n    __syncthreads();" => "bests[threadIdx.x >> 5] = top_column;",
            "a race|never written", subjects::BEST),
        mutation!("every warp's first thread writes the statistics",
            "if (threadIdx.x != 0) return;" => "if (threadIdx.x & 31) return;",
            "a race", subjects::STATISTICS),
        mutation!("two sums share their scratch",
            "of_target = block_sum<THREADS>(of_target, part[2]);" => "of_target = block_sum<THREADS>(of_target, part[1]);",
            "a race", subjects::STATISTICS),
        mutation!("scratch for fewer warps than there are",
            "__shared__ float part[6][WARPS];" => "__shared__ float part[1][WARPS];",
            "out of bounds|a race", subjects::STATISTICS),
        mutation!("blocks of a row overlap",
            "* (THREADS * W * PACKS) + threadIdx.x * W;" => "* (THREADS * W * (PACKS - 1)) + threadIdx.x * W;",
            "a race", subjects::GRADIENT),
        mutation!("a row's tail is not written",
            "if (i >= whole) continue;" => "if (i + THREADS >= whole) continue;",
            OTHER_BITS, subjects::GRADIENT),
        mutation!("a row's last numbers, too few for 16 bytes, are no logits",
            "if (W > 1 && whole + (int)threadIdx.x < columns) seen" => "if (W > 1 && whole + (int)threadIdx.x + 1 < columns) seen",
            OTHER_BITS, subjects::STATISTICS_OF_ODD_ROWS),
        mutation!("a row's last numbers are taken for a whole word",
            "const int whole = columns / W * W;\n  T* z = tile + row * stride;\n  Seen" => "const int whole = columns;\n  T* z = tile + row * stride;\n  Seen",
            OTHER_BITS, subjects::STATISTICS_OF_ODD_ROWS),
        mutation!("a row's last numbers are rounded before they are read",
            "if (whole == columns) return;\n  __syncthreads();\n  if (last >= columns) return;" => "if (last >= columns) return;\n  load<float, 1>(z + last, end);",
            "a race", subjects::NARROW_OF_FEW),
        mutation!("every block of a row has its last numbers",
            "if (W == 1 || block != blocks - 1 || last >= columns) return;\n  load<T, 1>(z + last, f);\n  gradient" => "if (W == 1 || last >= columns) return;\n  load<T, 1>(z + last, f);\n  gradient",
            "a race", subjects::GRADIENT_OF_ODD_ROWS),
        mutation!("statistics of logits that are not rounded",
            "store_rounded<T, N>(z + i, f);" => "store<T, N>(z + i, f);",
            OTHER_BITS, subjects::STATISTICS_OF_16_BITS),
        mutation!(prelude "a row's last logits are not rounded before they are summed",
            "*p = rounded;\n    f[0] = widen(rounded);" => "*p = rounded;",
            OTHER_BITS, subjects::STATISTICS_OF_16_BITS),
        mutation!(prelude "the lower one of two fp16 is read twice",
            "widen(f16{(u16)(v.w[i] >> 16)});" => "widen(f16{(u16)v.w[i]});",
            OTHER_BITS, subjects::GRADIENT_OF_FP16),
        mutation!("written in place before it is read",
            "    __syncthreads();\n    UNROLL for (int k = 0; k < PACKS; k++) {\n      const int i = begin + (threadIdx.x + k * THREADS) * W;\n      if (i < whole) store" => "    UNROLL for (int k = 0; k < PACKS; k++) {\n      const int i = begin + (threadIdx.x + k * THREADS) * W;\n      if (i < whole) store",
            "a race", subjects::NARROW),
        mutation!(prelude "swapped operands of a conversion to two bf16",
            "cvt.rn.bf16x2.f32 %0, %1, %2;" => "cvt.rn.bf16x2.f32 %0, %2, %1;",
            OTHER_BITS, subjects::SWIGLU_16),
        mutation!(prelude "numbers are cut instead of rounded",
            "cvt.rn.bf16x2.f32 %0, %1, %2;" => "prmt.b32 %0, %1, %2, 0x3276;",
            OTHER_BITS, subjects::SWIGLU_16),
        mutation!("neighbours are far apart",
            "(int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;\n  if (i >= features) return;\n  float g[W], u[W];\n" => "(int)threadIdx.x * blocks + (int)(blockIdx.x - row * blocks)) * W;\n  if (i >= features) return;\n  float g[W], u[W];\n",
            SECTORS, subjects::SWIGLU_32),
        mutation!("a row's offset in 32 bits",
            "const i64 row = blockIdx.x / blocks;\n  const int i = ((int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;\n  if (i >= features) return;\n  float g[W], u[W];\n  load<T, W>(gate + row * gate_stride + i, g);" => "const i64 row = blockIdx.x / blocks;\n  const int i = ((int)(blockIdx.x - row * blocks) * THREADS + threadIdx.x) * W;\n  if (i >= features) return;\n  float g[W], u[W];\n  load<T, W>(gate + (int)row * (int)gate_stride + i, g);",
            OTHER_PLACE, subjects::FAR_ROWS),
        mutation!("the second half is read one pack too early",
            "load<T, W>(from + half + i, b);" => "load<T, W>(from + half + i - 4, b);",
            "not aligned", subjects::ROTATE),
        mutation!("sine and cosine are exchanged",
            "load<float, W>(cosines + i, c);\n    load<float, W>(cosines + half + i, s);" => "load<float, W>(cosines + i, s);\n    load<float, W>(cosines + half + i, c);",
            OTHER_BITS, subjects::ROTATE),
        mutation!("the input is written",
            "store<T, W>(to + half + i, b);" => "store<T, W>((T*)from + half + i, b);",
            "never written", subjects::ROTATE),
        mutation!("the first key is taken for a query",
            "const bool is_q = number < of_q;" => "const bool is_q = number <= of_q;",
            "out of bounds|never written|a race", subjects::ROTATE),
        mutation!("a key's head is counted from the first query",
            "is_q ? number : number - of_q;" => "number;",
            "out of bounds|never written", subjects::ROTATE),
        mutation!("blocks do not go on to their next part",
            "i += (i64)gridDim.x * THREADS * W) {" => "i += (i64)gridDim.x * THREADS * W * 1000) {",
            OTHER_BITS, subjects::SCALED),
        mutation!("a tensor's last number is dropped",
            "for (i64 k = i; k < end; k++) {" => "for (i64 k = i; k + 1 < end; k++) {",
            OTHER_BITS, subjects::MANY),
        mutation!(prelude "the search passes over a tensor's first block",
            ".first_block <= block) low" => ".first_block < block) low",
            OTHER_BITS, subjects::MANY),
        mutation!(prelude "the search ends before the last tensor",
            "int high = entries - 1; low < high;" => "int high = entries - 2; low < high;",
            OTHER_BITS, subjects::MANY),
        mutation!("the tail's weights are written to one place",
            "weight[k] = round_to<P>(e.master[k]);" => "weight[i] = round_to<P>(e.master[k]);",
            OTHER_BITS, subjects::MANY),
        mutation!("a tail of numbers is taken for a whole word",
            "if (i + W <= end) {" => "if (i + W <= end + 1) {",
            "out of bounds", subjects::MANY),
        mutation!("chunks overlap",
            "- e.first_block) * CHUNK;" => "- e.first_block) * (CHUNK - 8);",
            "a race", subjects::MANY),
        mutation!("squares that overflow in fp32",
            "if (s > 1e-30f && s < 1e38f) return s;" => "return s;",
            OTHER_BITS, subjects::SQUARES),
        mutation!("squares that vanish in fp32",
            "if (s > 1e-30f && s < 1e38f) return s;" => "if (s < 1e38f) return s;",
            OTHER_BITS, subjects::SQUARES),
        mutation!("a gradient's last numbers are not read",
            "for (int i = whole + threadIdx.x; i < part.numbers;" => "for (int i = whole + threadIdx.x; i + 1 < part.numbers;",
            OTHER_BITS, subjects::SQUARES),
        mutation!("a part's end is that of the chunk",
            "rest < CHUNK ? (int)rest : CHUNK" => "CHUNK",
            "out of bounds", subjects::SQUARES),
        mutation!("packs read ahead overlap",
            "raw[k].read(part.values + i + k * STEP);" => "raw[k].read(part.values + i + (k & ~1) * STEP);",
            OTHER_BITS, subjects::SQUARES),
        mutation!("every warp writes its part",
            "if (threadIdx.x == 0) parts[blockIdx.x] = sum;" => "if ((threadIdx.x & 31) == 0) parts[blockIdx.x] = sum;",
            "a race", subjects::SQUARES),
        mutation!("a part is not added up",
            "for (int k = 1; k < AHEAD; k++) sums[0]" => "for (int k = 1; k < AHEAD - 1; k++) sums[0]",
            OTHER_BITS, subjects::NORM_OF_PARTS),
        mutation!("a part beyond the last",
            "if (i + k * THREADS < count) sums" => "if (i + k * THREADS <= count) sums",
            "out of bounds", subjects::NORM_OF_PARTS),
        mutation!("many gradients: chunks overlap",
            "- g.first_block) * CHUNK;" => "- g.first_block) * (CHUNK - 16);",
            "a race", subjects::SCALED_MANY),
        mutation!("many gradients: the last numbers are taken for a whole word",
            "const int whole = part.numbers / W * W;" => "const int whole = part.numbers;",
            "out of bounds|a race", subjects::SCALED_MANY),
        mutation!("the two weights of a byte are exchanged",
            "j % 2 ? 4 * j - 4 : 4 * j + 4" => "4 * j",
            OTHER_BITS, subjects::DEQUANTIZED),
        mutation!("values are read without a barrier",
            "tables.weights[threadIdx.x];\n  __syncthreads();" => "tables.weights[threadIdx.x];",
            "a race|never written", subjects::DEQUANTIZED),
        mutation!("a nested scale is rounded once",
            "__fadd_rn(__fmul_rn(tables.scales[code], number), mean)" => "fmaf(tables.scales[code], number, mean)",
            OTHER_BITS, subjects::DEQUANTIZED),
        mutation!("a pack beyond the last",
            "if (pack >= (u32)packs) continue;" => "if (pack > (u32)packs) continue;",
            "out of bounds|a race", subjects::DEQUANTIZED),
        mutation!("both elements of a pair have the lower half",
            "second ? (u32)(hash >> 32) : (u32)hash" => "(u32)hash",
            OTHER_BITS, subjects::DROPPED),
        mutation!("the first counter is 0",
            "(u64)((i + j) / 2 + 1)" => "(u64)((i + j) / 2)",
            OTHER_BITS, subjects::DROPPED),
        mutation!("each pair draws the first one's hash",
            "if (W == 1 || j % 2 == 0) hash" => "if (W == 1 || j == 0) hash",
            OTHER_BITS, subjects::DROPPED),
        mutation!("an overflow does not reset the growth tracker",
            "growth_tracker = 0.0;\n    skipped" => "skipped",
            OTHER_BITS, subjects::LOSS_SCALED),
        mutation!("a scale falls below the minimum",
            "scale = fallen > min_scale ? fallen : min_scale;" => "scale = fallen;",
            OTHER_BITS, subjects::LOSS_SCALED),
        mutation!("every thread updates the scale",
            "if (threadIdx.x != 0) return;\n  double" => "double",
            "a race", subjects::LOSS_SCALED),
        mutation!("a window's columns begin with the matrix's",
            "const i64 at = first + row * inner + column;" => "const i64 at = first / inner * inner + row * inner + column;",
            OTHER_BITS, subjects::DEQUANTIZED),
    ]
}

#[test]
fn every_mutation_of_a_kernel_is_detected() {
    if !program::is_available() {
        return;
    }
    let mutations = mutations();
    assert!(mutations.len() >= 20);
    let mut sound: Vec<(&str, Program)> = Vec::new();
    let mut missed = Vec::new();
    for Mutation { what, in_prelude, from, to, noticed, case } in mutations {
        let KernelCase { source, expression, run } = case;
        let expressions = [expression.to_owned()];
        if !sound.iter().any(|(of, _)| *of == expression) {
            sound.push((expression, Program::from_text(source.0, PRELUDE, &expressions)));
        }
        let Some((_, original)) = sound.iter().find(|(of, _)| *of == expression) else { continue };
        let text = if in_prelude { PRELUDE } else { source.0 };
        assert_eq!(text.matches(from).count(), 1, "{what}: the text to change is not there once");
        let changed = text.replace(from, to);
        let (text, prelude) = if in_prelude { (source.0, &*changed) } else { (&*changed, PRELUDE) };
        let program = Program::from_text(text, prelude, &expressions);
        let (before, after) = (run(original), run(&program));
        let caught = match (&before, &after) {
            (Seen::Fault(_), Seen::Values(..)) => noticed == OTHER_PLACE,
            (Seen::Values(..), Seen::Fault(fault)) => noticed.split('|').any(|words| fault.contains(words)),
            (Seen::Values(before, least), Seen::Values(after, sectors)) => match noticed {
                SECTORS => *least <= 1.15 && *sectors > 1.15,
                OTHER_BITS => before.iter().zip(after).any(|(a, b)| !same_bits(a, b)),
                _ => false,
            },
            (Seen::Fault(_), Seen::Fault(_)) => false,
        };
        if !caught {
            missed.push(format!("{what}: expected `{noticed}`, found {after:?}, before {before:?}"));
        }
    }
    assert!(missed.is_empty(), "{} are missed:\n{}", missed.len(), missed.join("\n"));
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bytes = |t: &Tensor| t.contiguous().reshape([-1]).view_dtype(Kind::Uint8);
    bytes(a).equal(&bytes(b))
}
