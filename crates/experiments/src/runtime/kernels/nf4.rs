//! Dequantization of a weight in NF4.

use kernels::nf4::{self, Scales};
use kernels::quantized;
use report::cli::Scale;
use tch::Device;

use super::{Figures, KIND, Line, measure_line, random, sized};

pub(super) fn dequantization(device: Device, scale: Scale) -> anyhow::Result<Figures> {
    let [out, inner] = sized(device, scale, [[14_336, 4096], [4864, 896], [128, 896]]);
    let weight = random(&[out, inner], device)?;
    let stored = nf4::quantize(&weight, Scales::Nested)?;
    let line = Line {
        what: "NF4 to bf16",
        shape: format!("{out} × {inner}"),
        bytes: (stored.numel() + 2 * weight.numel()) as f64,
        ours: Box::new(move |_| quantized::dequantize(&stored, KIND).map(drop)),
        libtorch: None,
    };
    let mut figures = Vec::new();
    measure_line(line, device, scale, &mut figures)?;
    Ok(figures)
}
