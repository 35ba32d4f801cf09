//! Products of the MKL inside libtorch that [`crate::matmul`] does not use, to be measured beside those that it does.
//!
//! libtorch has them on x86-64 only. Sources: Intel's reference of `cblas_gemm_pack`, `cblas_gemm_compute` and
//! `cblas_gemm_bf16bf16f32`.

use tch::Tensor;

use crate::error::Result;
use crate::sys::mkl;

/// An fp32 weight `[out, in]` that was packed once for products with a number of rows.
pub struct PackedWeight(mkl::PackedWeight);

impl PackedWeight {
    /// Packs a dense fp32 weight on the CPU for products with `rows` rows; `None` if libtorch has no such function.
    ///
    /// # Errors
    /// Another dtype, layout or device; a size of 0 or from 2³¹ on; too little memory.
    pub fn new(weight: &Tensor, rows: i64) -> Result<Option<Self>> {
        Ok(mkl::PackedWeight::new(weight, rows)?.map(Self))
    }

    /// Returns the bytes of the packed weight.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Computes `out [rows, out] = x [rows, in]·Wᵀ` in fp32.
    ///
    /// # Errors
    /// Operands that are not dense fp32 matrices of these sizes on the CPU.
    pub fn multiply_into(&self, out: &mut Tensor, x: &Tensor) -> Result<()> {
        self.0.multiply_into(out, x)
    }
}

/// Computes `out [rows, out]` in fp32 `= x [rows, in]·Wᵀ` of bf16 operands; returns false if libtorch has no such function.
///
/// # Errors
/// Operands that are not dense matrices of these dtypes and sizes on the CPU.
pub fn multiply_bf16_into(out: &mut Tensor, x: &Tensor, weight: &Tensor) -> Result<bool> {
    mkl::multiply_bf16_into(out, x, weight)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn products_are_those_of_libtorch() {
        let operand = |size: [i64; 2]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let (x, weight) = (operand([33, 70]), operand([50, 70]));
        let expected = x.matmul(&weight.tr());
        let mut out = Tensor::zeros([33, 50], (Kind::Float, Device::Cpu));
        let apart = |out: &Tensor, expected: &Tensor| (out - expected).abs().max().double_value(&[]);
        match PackedWeight::new(&weight, 33).unwrap() {
            Some(packed) => {
                packed.multiply_into(&mut out, &x).unwrap();
                assert!(packed.bytes() >= 4 * 50 * 70 && apart(&out, &expected) < 1e-4);
                assert!(packed.multiply_into(&mut out, &operand([32, 70])).is_err());
            }
            None => assert_ne!(std::env::consts::ARCH, "x86_64"),
        }
        let [x, weight] = [x, weight].map(|tensor| tensor.to_kind(Kind::BFloat16));
        if multiply_bf16_into(&mut out, &x, &weight).unwrap() {
            let [x, weight] = [&x, &weight].map(|tensor| tensor.to_kind(Kind::Float));
            assert!(apart(&out, &x.matmul(&weight.tr())) < 1e-4);
        }
        assert!(multiply_bf16_into(&mut out, &x, &operand([50, 70])).is_err());
    }
}
