//! Matrix-vector products with weights in their stored dtype.

use kernels::matmul::{FEW, matvec};
use kernels::quantized::is_quantized;
use runtime::precision::{Policy, Product};
use tch::Tensor;

/// Uses [`matvec`] for projections of a few tokens where that is faster.
///
/// A policy that is active only during generation: in training the same rows may be computed twice, with and without a graph,
/// and must give the same bits.
#[derive(Debug)]
pub(super) struct StoredWeights;

impl Policy for StoredWeights {
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> runtime::Result<Tensor> {
        let mut shape = x.size();
        let Some(width) = shape.pop() else { return product(x, weight, bias) };
        let vectors: i64 = shape.iter().product();
        let result = if vectors <= FEW && (x.kind() == weight.kind() || is_quantized(weight)) {
            matvec(&x.f_reshape([vectors, width])?, weight, bias)?
        } else {
            None
        };
        match result {
            Some(result) => {
                shape.push(result.size()[1]);
                Ok(result.f_view(shape.as_slice())?)
            }
            None => product(x, weight, bias),
        }
    }
}
