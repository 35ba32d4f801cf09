//! Dropout as a CUDA kernel.

use runtime::Result;
use runtime::tensor_memory::bump_version;
use tch::{Kind, Tensor};

use super::{Mask, Seed, base_of_step};
use crate::cuda::{Argument, Source, are_ready, expect, float, launch, optional, pointer, type_of, width};

pub(crate) const SOURCE: Source = Source(include_str!("dropout.cuh"));

const NAME: &str = "dropout";
const THREADS: u32 = 256;
/// Blocks: enough for every GPU, and few enough to start cheaply.
const BLOCKS: i64 = 2112;

/// Writes x·mask·scale to `out` of x's shape, or mask·scale without x; returns false if the kernel does not support the tensors.
pub(crate) fn dropout(x: Option<&Tensor>, out: &Tensor, mask: Mask, scale: f64) -> Result<bool> {
    let (size, kind, device) = (out.size(), out.kind(), out.device());
    let Some(element) = type_of(kind).filter(|_| are_ready(device)) else { return Ok(false) };
    expect(NAME, "x", x, &size, (kind, device))?;
    expect(NAME, "out", out, &size, (kind, device))?;
    let numbers = out.numel() as i64;
    if numbers == 0 {
        return Ok(true);
    }
    let tensors: Vec<&Tensor> = x.into_iter().chain([out]).collect();
    let width = width(&[kind], &tensors, &[numbers]);
    let block_numbers = width * i64::from(THREADS);
    let (base, seed) = match mask.seed {
        Seed::Host(seed) => (None, seed),
        Seed::Step { call } => (Some(base_of_step()?), call),
    };
    expect(NAME, "base", base.as_ref(), &[1], (Kind::Int64, device))?;
    let arguments = [
        optional(x),
        pointer(out),
        Argument::I64(numbers),
        optional(base.as_ref()),
        Argument::I64(seed.cast_signed()),
        Argument::I64(mask.threshold().cast_signed()),
        float(scale),
    ];
    let blocks = ((numbers + block_numbers - 1) / block_numbers).min(BLOCKS);
    launch(
        SOURCE,
        &format!("dropout<{element}, {width}, {THREADS}>"),
        device,
        (blocks, THREADS),
        &arguments,
    )?;
    bump_version(out)?;
    Ok(true)
}
