//! A step of AdamW with moments in 8 bits by libtorch's operators, on any device.

use runtime::Result;
use runtime::ops::{TryScalar, foreach};
use tch::{Kind, Tensor};

use super::{Adam8bitTensors, BLOCK, Coefficients, Moment, levels};
use crate::adam::AdamStep;

/// Elements whose temporaries are allocated at a time, a multiple of a block: 32 bytes for each at most.
const PART: i64 = 1 << 20;

/// Runs a step of tensors that the caller has checked.
pub(super) fn step(tensors: &Adam8bitTensors<'_>, step: &AdamStep) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let Adam8bitTensors { parameter, gradient, exp_avg, exp_avg_sq } = *tensors;
    let device = parameter.device();
    let map = |levels: &[f32; 256]| -> Result<[Tensor; 2]> {
        let middles: Vec<f32> = levels.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        Ok([
            Tensor::f_from_slice(levels)?.f_to_device(device)?,
            Tensor::f_from_slice(&middles)?.f_to_device(device)?,
        ])
    };
    let maps = [map(levels::signed())?, map(levels::unsigned())?];
    let coefficients = Coefficients::new(step);
    let (parameter, gradient) = (parameter.f_view([-1])?, gradient.f_view([-1])?);
    let moments = [exp_avg, exp_avg_sq];
    let codes = moments.map(|moment| moment.codes.f_view([-1]));
    let [codes_of_m, codes_of_v] = codes;
    let codes = [codes_of_m?, codes_of_v?];
    let elements = parameter.numel() as i64;
    // Parts of whole blocks, and the block that is not whole.
    let whole = elements / BLOCK * BLOCK;
    let mut from = 0;
    while from < elements {
        let count = if from < whole { PART.min(whole - from) } else { elements - from };
        let of = |tensor: &Tensor| tensor.f_narrow(0, from, count);
        let (first_block, blocks) = (from / BLOCK, super::scales(count));
        let of_scales = |moment: Moment<'_>| moment.scales.f_view([-1])?.f_narrow(0, first_block, blocks);
        let part = Part {
            parameter: of(&parameter)?,
            gradient: of(&gradient)?,
            codes: [of(&codes[0])?, of(&codes[1])?],
            scales: [of_scales(exp_avg)?, of_scales(exp_avg_sq)?],
            blocks,
        };
        part.step(&maps, coefficients)?;
        from += count;
    }
    Ok(())
}

/// Flat views of elements in blocks of one length.
struct Part {
    parameter: Tensor,
    gradient: Tensor,
    codes: [Tensor; 2],
    scales: [Tensor; 2],
    blocks: i64,
}

impl Part {
    fn step(&self, maps: &[[Tensor; 2]; 2], c: Coefficients) -> Result<()> {
        let g = &self.gradient;
        let m = self.dequantized(0, &maps[0][0])?;
        let _ = m.try_mul_scalar_(f64::from(c.beta1))?;
        foreach::add_scaled_(&[&m], &[g], f64::from(c.rest1))?;
        let v = self.dequantized(1, &maps[1][0])?;
        let _ = v.try_mul_scalar_(f64::from(c.beta2))?;
        foreach::addcmul_(&[&v], &[g], &[g], f64::from(c.rest2))?;
        let divisor = v.f_sqrt()?.try_div_scalar(f64::from(c.root))?.try_add_scalar_(f64::from(c.eps))?;
        let _ = self.parameter.try_mul_scalar_(f64::from(c.shrink))?;
        foreach::addcdiv_(&[&self.parameter], &[&m], &[&divisor], -f64::from(c.rate))?;
        let quantized = self.quantized(0, &m, &maps[0][1])?;
        self.codes[0].shallow_clone().f_copy_(&quantized)?;
        // A second moment above 0 gets a code above that of 0.
        let least = v.try_ne(0.0)?.f_to_kind(Kind::Int)?;
        let quantized = self.quantized(1, &v, &maps[1][1])?.f_maximum(&least)?;
        Ok(self.codes[1].shallow_clone().f_copy_(&quantized)?)
    }

    /// Returns a moment in fp32, `[elements]`.
    fn dequantized(&self, index: usize, levels: &Tensor) -> Result<Tensor> {
        let levels = levels.f_index_select(0, &self.codes[index].f_to_kind(Kind::Int)?)?;
        let scales = self.scales[index].f_view([self.blocks, 1])?;
        Ok(levels.f_view([self.blocks, -1])?.f_mul(&scales)?.f_view([-1])?)
    }

    /// Writes a moment's scales and returns its codes, `[elements]`.
    fn quantized(&self, index: usize, moment: &Tensor, middles: &Tensor) -> Result<Tensor> {
        let moment = moment.f_view([self.blocks, -1])?;
        let scales = moment.f_abs()?.f_amax([1], true)?;
        self.scales[index].shallow_clone().f_copy_(&scales.f_view([-1])?)?;
        let is_zero = scales.try_eq(0.0)?.f_to_kind(Kind::Float)?;
        let numbers = moment.f_div(&scales.f_add(&is_zero)?)?;
        Ok(numbers.f_bucketize(middles, true, false)?.f_view([-1])?)
    }
}
