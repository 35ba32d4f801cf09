//! Stochastic rounding by libtorch's operators, with the bits of the kernels.

use runtime::Result;
use runtime::ops::TryScalar;
use tch::{Kind, Tensor};

use super::{INCREMENT, LEAST_NORMAL_F16, MIX, Rounding, RoundingPass, StepNumber};

/// libtorch's operators, on any device, without reading it.
pub(super) struct Reference;

impl RoundingPass for Reference {
    fn round(&self, all: &[Rounding<'_>]) -> Result<()> {
        all.iter().try_for_each(round)
    }
}

/// Elements rounded at a time, so that integers of 64 bits take at most 32 MiB each.
const PART: i64 = 1 << 22;

fn round(one: &Rounding<'_>) -> Result<()> {
    let Rounding { source, target, stream, step } = one;
    let device = source.device();
    // The seed of the step's hashes, an int64 of one element. Integers of 64 bits wrap around.
    let mut seed = match step {
        StepNumber::Host(step) => Tensor::f_from_slice(&[step.cast_signed()])?.f_to_device(device)?,
        StepNumber::Device(step) => step.f_detach()?.f_reshape([1])?.f_to_kind(Kind::Int64)?,
    };
    seed = seed.try_mul_scalar(INCREMENT.cast_signed())?.try_add_scalar_(stream.key.cast_signed())?;
    seed = mixed(seed)?;
    let (source, target) = (source.f_view([-1])?, target.f_view([-1])?);
    let numbers = source.numel() as i64;
    for from in (0..numbers).step_by(PART as usize) {
        let count = PART.min(numbers - from);
        let begin = stream.first.cast_signed() + from;
        let (first, last) = (begin / 4, (begin + count - 1) / 4);
        let counters = Tensor::try_arange_start(first + 1, last + 2, (Kind::Int64, device))?;
        let _ = counters.try_mul_scalar_(INCREMENT.cast_signed())?.f_add_(&seed)?;
        let hashes = mixed(counters)?;
        let quarters = (0..4).map(|quarter| {
            Ok(hashes.try_bitwise_right_shift_tensor_scalar(16 * quarter)?.try_bitwise_and(0xffffi64)?)
        });
        let quarters: Vec<Tensor> = quarters.collect::<Result<_>>()?;
        let random = Tensor::f_stack(&quarters, 1)?.f_view([-1])?.f_narrow(0, begin - 4 * first, count)?;
        let (p, mut to) = (source.f_narrow(0, from, count)?, target.f_narrow(0, from, count)?);
        let (candidate, largest) = match target.kind() {
            Kind::BFloat16 => (candidate_in_bf16(&p, &random)?, LARGEST_BF16),
            _ => (candidate_in_f16(&p, &random)?, LARGEST_F16),
        };
        let is_below = p.f_abs()?.try_lt(f64::from(largest))?;
        to.f_copy_(&candidate.f_where_self(&is_below, &p)?)?;
    }
    Ok(())
}

/// Returns the last of SplitMix64's steps, on int64.
fn mixed(mut z: Tensor) -> Result<Tensor> {
    // A shift keeps the sign, which is masked out.
    let fold = |z: &Tensor, shift: i64| -> Result<Tensor> {
        let bits =
            z.try_bitwise_right_shift_tensor_scalar(shift)?.try_bitwise_and((1i64 << (64 - shift)) - 1)?;
        Ok(z.f_bitwise_xor_tensor(&bits)?)
    };
    for (shift, factor) in MIX {
        z = fold(&z, shift)?;
        let _ = z.try_mul_scalar_(factor.cast_signed())?;
    }
    fold(&z, 31)
}

/// Numbers that bf16 has, in fp32, for those below its largest.
fn candidate_in_bf16(p: &Tensor, random: &Tensor) -> Result<Tensor> {
    let mut bits = p.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?;
    Ok(bits.f_add_(random)?.try_bitwise_and(!0xffffi64)?.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?)
}

/// Returns the same for fp16.
fn candidate_in_f16(p: &Tensor, random: &Tensor) -> Result<Tensor> {
    let magnitude = p.f_abs()?;
    let mut bits = magnitude.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?;
    let lowest_13_bits = random.try_bitwise_right_shift_tensor_scalar(3i64)?;
    let normal = bits.f_add_(&lowest_13_bits)?.try_bitwise_and(!0x1fffi64)?;
    let normal = normal.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?;
    let scaled = magnitude.try_mul_scalar(F16_SUBNORMALS)?;
    let floor = scaled.f_floor()?;
    let mut rest = scaled.f_sub(&floor)?.try_mul_scalar(65536.0)?.f_to_kind(Kind::Int64)?;
    let up = rest.f_add_(random)?.try_bitwise_right_shift_tensor_scalar(16i64)?;
    let subnormal = floor.f_add(&up)?.try_mul_scalar(1.0 / F16_SUBNORMALS)?;
    let is_small = magnitude.try_lt(f64::from(f32::from_bits(LEAST_NORMAL_F16)))?;
    Ok(subnormal.f_where_self(&is_small, &normal)?.f_copysign(p)?)
}

/// The largest numbers of the targets.
const LARGEST_BF16: f32 = f32::from_bits(0x7f7f_0000);
const LARGEST_F16: f32 = 65504.0;
/// fp16's subnormal numbers in 1.
const F16_SUBNORMALS: f64 = 16_777_216.0;
