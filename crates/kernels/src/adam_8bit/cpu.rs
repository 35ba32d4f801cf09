//! A step of AdamW with moments in 8 bits in one pass over memory.

use pulp::{Simd, WithSimd};
use runtime::Result;
use runtime::parallel;
use runtime::tensor_memory::bump_version;
use tch::Tensor;

use super::levels::{Levels, SIGNED, UNSIGNED};
use super::{Adam8bitTensors, Coefficients};
use crate::adam::AdamStep;
use crate::simd;

const BLOCK: usize = super::BLOCK as usize;
/// Blocks of one task: 64 Ki elements.
const TASK: usize = 256;

/// Runs a step of tensors that the caller has checked, on the CPU.
pub(super) fn step(tensors: &Adam8bitTensors<'_>, step: &AdamStep) -> Result<()> {
    let Adam8bitTensors { parameter, gradient, exp_avg, exp_avg_sq } = *tensors;
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    let elements = parameter.numel();
    let pass = Pass {
        elements,
        parameter: address(parameter),
        gradient: address(gradient),
        codes: [exp_avg, exp_avg_sq].map(|moment| address(moment.codes)),
        scales: [exp_avg, exp_avg_sq].map(|moment| address(moment.scales)),
        coefficients: Coefficients::new(step),
        levels: [&*SIGNED, &*UNSIGNED],
    };
    let arch = simd::arch();
    let blocks = elements.div_ceil(BLOCK);
    parallel::for_each(blocks.div_ceil(TASK), |task| {
        for block in task * TASK..blocks.min((task + 1) * TASK) {
            arch.dispatch(Block { pass, block });
        }
    })?;
    let written = [parameter, exp_avg.codes, exp_avg.scales, exp_avg_sq.codes, exp_avg_sq.scales];
    written.into_iter().try_for_each(bump_version)
}

/// Addresses of dense memory on the CPU, which overlaps nowhere.
#[derive(Clone, Copy)]
struct Pass {
    elements: usize,
    parameter: usize,
    gradient: usize,
    /// Of the first and the second moment.
    codes: [usize; 2],
    scales: [usize; 2],
    coefficients: Coefficients,
    levels: [&'static Levels; 2],
}

struct Block {
    pass: Pass,
    block: usize,
}

impl WithSimd for Block {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { pass, block } = self;
        let from = block * BLOCK;
        let count = BLOCK.min(pass.elements - from);
        // SAFETY: the caller of `step` has checked that so many dense elements lie at each address, fp32 and bytes, on the CPU, with a scale for
        // each block, and that written operands overlap no other; the tensors outlive the call, and each block is one task's.
        let (p, g, [m, v], [of_m, of_v]) = unsafe {
            (
                std::slice::from_raw_parts_mut((pass.parameter as *mut f32).wrapping_add(from), count),
                std::slice::from_raw_parts((pass.gradient as *const f32).wrapping_add(from), count),
                pass.codes.map(|codes| {
                    std::slice::from_raw_parts_mut((codes as *mut u8).wrapping_add(from), count)
                }),
                pass.scales.map(|scales| &mut *(scales as *mut f32).wrapping_add(block)),
            )
        };
        let (c, [signed, unsigned]) = (pass.coefficients, pass.levels);
        let (mut first, mut second) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
        for i in 0..count {
            first[i] = signed.levels[usize::from(m[i])];
            second[i] = unsigned.levels[usize::from(v[i])];
        }
        let (mut largest, mut largest_square) = (0.0f32, 0.0f32);
        for i in 0..count {
            first[i] = c.beta1 * (first[i] * *of_m) + c.rest1 * g[i];
            second[i] = c.beta2 * (second[i] * *of_v) + c.rest2 * g[i] * g[i];
            p[i] = p[i] * c.shrink - c.rate * first[i] / (second[i].sqrt() / c.root + c.eps);
            largest = largest.max(first[i].abs());
            largest_square = largest_square.max(second[i]);
        }
        // Of a block of zeros everything is 0: nothing is divided by 0.
        let [divisor, divisor_of_squares] =
            [largest, largest_square].map(|scale| if scale > 0.0 { scale } else { 1.0 });
        for i in 0..count {
            m[i] = signed.signed_code(first[i] / divisor);
            v[i] = unsigned.unsigned_code(second[i] / divisor_of_squares);
        }
        (*of_m, *of_v) = (largest, largest_square);
    }
}
