//! Multiplication of a tensor by a scalar on its device, in place.

use runtime::Result;
use runtime::tensor_memory::bump_version;
use tch::{Kind, Tensor};

use crate::cuda::{Argument, Source, are_ready, expect, launch, pointer, type_of, width};

pub(crate) const SOURCE: Source = Source(include_str!("scale.cuh"));

const NAME: &str = "scale";
const THREADS: u32 = 256;
/// Blocks: enough for every GPU, and few enough to start cheaply.
const BLOCKS: i64 = 2112;

/// Computes `x *= factor`, where `factor` is an fp32 scalar on x's device; returns false if the kernel does not support x. If the
/// factor is 1, it costs a launch and no pass over memory.
pub(crate) fn scale(x: &Tensor, factor: &Tensor) -> Result<bool> {
    let device = x.device();
    let Some(element) = type_of(x.kind()).filter(|_| are_ready(device) && x.is_contiguous() && !x.is_neg())
    else {
        return Ok(false);
    };
    if factor.numel() != 1 || factor.kind() != Kind::Float {
        return Ok(false);
    }
    let factor = factor.f_reshape([1])?;
    expect(NAME, "factor", &factor, &[1], (Kind::Float, device))?;
    let numbers = x.numel() as i64;
    if numbers == 0 {
        return Ok(true);
    }
    let width = width(&[x.kind()], &[x], &[numbers]);
    let block_numbers = width * i64::from(THREADS);
    let blocks = ((numbers + block_numbers - 1) / block_numbers).min(BLOCKS);
    let arguments = [pointer(x), Argument::I64(numbers), pointer(&factor)];
    launch(SOURCE, &format!("scale<{element}, {width}, {THREADS}>"), device, (blocks, THREADS), &arguments)?;
    bump_version(x)?;
    Ok(true)
}
