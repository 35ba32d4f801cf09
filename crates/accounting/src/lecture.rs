//! The small models of the resource-accounting lecture, and corrections of its errors.
//!
//! **A linear model** `x → h1 = x·w1 → h2 = h1·w2` with `w1: [D, D]`, `w2: [D, K]` and `B` points takes
//! `2·B·(D² + D·K) = 2·B·N` FLOPs forward and twice that backward: `6·B·N`. The last of the backward's products,
//! `x.grad = h1.grad·w1ᵀ`, is done only if the input needs a gradient: without it `6·B·N - 2·B·D²`.
//!
//! **The deep linear model** ("Cruncher") has `L` layers of `[D, D]` and a last one of `[D, 1]`. In fp32 with AdaGrad:
//!
//! ```text
//! parameters       N = D²·L + D
//! activations      B·D·L
//! gradients        N
//! optimizer state  N
//! memory           4 · (N + B·D·L + N + N) bytes
//! step             6·B·N FLOPs
//! ```
//!
//! Source: CS336 (Stanford, 2025), lecture 2. **Errors corrected here**, each with a test:
//!
//! - "8 H100 for 2 weeks" is computed with the seconds of one week: 4.788e21 FLOPs, where two weeks give 9.575e21;
//! - H100's 1979 TFLOP/s are with sparsity, and a dense product reaches half; days computed with them are half of the real
//!   ones;
//! - a feed-forward matrix of GPT-3 takes 2304 MiB, called 2.3 GB: it is 2.25 GiB or 2.42 GB;
//! - the backward of the linear model counts `h2.grad` with 2·B·K among products, but it is elementwise; and it counts `x.grad`
//!   (2·B·D²), which an input without a gradient does not need.

use crate::exact::{positive, product, sum, wide_product, wide_sum};
use crate::flops::MatrixProduct;
use crate::memory::Item;
use crate::{Dtype, Error};

/// The lecture's linear model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearModel {
    /// Points, `B`.
    pub batch: u64,
    /// Width, `D`.
    pub dim: u64,
    /// Outputs, `K`.
    pub outputs: u64,
}

impl LinearModel {
    /// `N = D² + D·K`.
    pub fn parameters(self) -> Result<u64, Error> {
        let Self { dim, outputs, .. } = self;
        sum("parameters", [product("parameters", &[dim, dim])?, product("parameters", &[dim, outputs])?])
    }

    /// FLOPs of the forward, `2·B·N`.
    pub fn forward_flops(self) -> Result<u128, Error> {
        let [first, second] = self.products();
        wide_sum("FLOPs", [first.flops()?, second.flops()?])
    }

    /// FLOPs of the backward: `4·B·N`, less `2·B·D²` for an input that needs no gradient.
    pub fn backward_flops(self, input_needs_grad: bool) -> Result<u128, Error> {
        let [first, second] = self.products();
        wide_sum("FLOPs", [first.backward_flops(input_needs_grad, true)?, second.backward_flops(true, true)?])
    }

    fn products(self) -> [MatrixProduct; 2] {
        let Self { batch, dim, outputs } = self;
        [MatrixProduct::new(batch, dim, dim), MatrixProduct::new(batch, dim, outputs)]
    }
}

/// The lecture's deep linear model: `layers` products `[dim, dim]` and one `[dim, 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeepLinearModel {
    /// Points, `B`.
    pub batch: u64,
    /// Width, `D`.
    pub dim: u64,
    /// Layers, `L`.
    pub layers: u64,
}

impl DeepLinearModel {
    /// `N = D²·L + D`.
    pub fn parameters(self) -> Result<u64, Error> {
        let Self { dim, layers, .. } = self;
        positive("the deep linear model's width", dim)?;
        sum("parameters", [product("parameters", &[dim, dim, layers])?, dim])
    }

    /// Bytes with AdaGrad in fp32: parameters, activations, gradients, optimizer state.
    pub fn memory(self) -> Result<[Item; 4], Error> {
        positive("the deep linear model's batch", self.batch)?;
        let n = Dtype::Fp32.bytes(self.parameters()?)?;
        let activations = Dtype::Fp32.bytes(product("activations", &[self.batch, self.dim, self.layers])?)?;
        Ok([
            Item { name: "parameters", bytes: n },
            Item { name: "activations", bytes: activations },
            Item { name: "gradients", bytes: n },
            Item { name: "optimizer state", bytes: n },
        ])
    }

    /// FLOPs of a step, `6·B·N`.
    pub fn step_flops(self) -> Result<u128, Error> {
        wide_product("FLOPs of a step", &[6, self.batch, self.parameters()?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::total;
    use crate::training_time::{Run, promised_flops, six_n_d};
    use crate::{hardware, quantity};

    #[test]
    fn the_linear_model_takes_6bn() {
        for (batch, dim, outputs) in [(1024, 256, 64), (16384, 32768, 8192)] {
            let model = LinearModel { batch, dim, outputs };
            let n = u128::from(model.parameters().unwrap());
            let (b, d) = (u128::from(batch), u128::from(dim));
            assert_eq!(model.forward_flops().unwrap(), 2 * b * n);
            assert_eq!(model.backward_flops(true).unwrap(), 4 * b * n);
            assert_eq!(model.backward_flops(false).unwrap(), 4 * b * n - 2 * b * d * d);
        }
    }

    #[test]
    fn the_deep_linear_model_takes_6bn() {
        let model = DeepLinearModel { batch: 8, dim: 64, layers: 2 };
        let n = 64 * 64 * 2 + 64;
        assert_eq!(model.parameters().unwrap(), n);
        assert_eq!(total(&model.memory().unwrap()).unwrap(), 4 * (n + 8 * 64 * 2 + n + n));
        assert_eq!(model.step_flops().unwrap(), 6 * 8 * u128::from(n));
    }

    #[test]
    fn slip_two_weeks_are_fourteen_days() {
        let peak = hardware::find("h100").unwrap().bf16;
        let promised = |days: f64| promised_flops(peak, 8, days * 86_400.0).unwrap();
        assert_eq!(format!("{:.3e}", promised(7.0)), "4.788e21", "as the lecture has it");
        assert_eq!(format!("{:.3e}", promised(14.0)), "9.575e21", "as it is");
    }

    #[test]
    fn slip_a_peak_with_sparsity_halves_the_days() {
        let flops = six_n_d(70_000_000_000, 15_000_000_000_000).unwrap();
        let days = |peak| Run { flops, peak, utilization: 0.5, devices: 1024 }.days().unwrap();
        assert_eq!(format!("{:.2}", days(hardware::H100_BF16_WITH_SPARSITY)), "71.96");
        assert_eq!(format!("{:.2}", days(hardware::find("h100").unwrap().bf16)), "143.93");
    }

    #[test]
    fn slip_2304_mib_are_not_2_3_gb() {
        let bytes = Dtype::Fp32.tensor_bytes(&[12288 * 4, 12288]).unwrap();
        assert_eq!(quantity::bytes_text(bytes), "2.25 GiB");
        assert_eq!(format!("{:.2}", bytes as f64 / 1e9), "2.42");
    }
}
