//! A causal depthwise convolution with SiLU, as before linear attention (Mamba, arXiv:2312.00752; arXiv:2412.06464).
//!
//! For channel c of token t, with a window of w tokens and the channel's weights, the last for the token itself:
//!
//! ```text
//! sₜ = Σⱼ weight[c, j]·x[t − (w − 1) + j, c]         yₜ = sₜ·σ(sₜ)
//! ```
//!
//! Tokens before the row are zeros, or those of `previous`; those of another document count as zeros. With d the gradient of y,
//! ds = d·σ(s)(1 + s(1 − σ(s))), ∂L/∂x[t, c] = Σⱼ weight[c, j]·ds[t + (w − 1) − j, c], and ∂L/∂weight[c, j] = Σₜ ds[t, c]·x[t − (w − 1) + j, c].
//!
//! Only x and the weights are saved: backward computes s again, which is w products per number. x stays `[b, t, channels]`, as projections
//! return it and attention takes it, where libtorch's convolution transposes it twice. Computed in fp32 for fp32, bf16 and fp16, in f64
//! for f64, and rounded once.

mod function;

use runtime::autograd;
use runtime::{Error, Result};
use tch::Tensor;

use function::Convolution;

const NAME: &str = "causal convolution";

/// Convolves `x` `[b, t, channels]` with `weight` `[channels, w]` or `[channels, 1, w]`. `documents` `[b, t]`, int64, has the document of each
/// token. `previous` `[b, w − 1, channels]` are the inputs before the first token, without a gradient; zeros if absent. The result has x's
/// shape and dtype.
///
/// ```
/// use kernels::causal_conv::causal_conv;
/// use tch::Tensor;
///
/// let x = Tensor::from_slice(&[1.0f64, 2.0, 3.0]).view([1, 3, 1]);
/// let weight = Tensor::from_slice(&[10.0f64, 1.0]).view([1, 2]);
/// let y = causal_conv(&x, &weight, None, None)?;
/// // 1, 12 and 23, each times its sigmoid.
/// assert!((y.double_value(&[0, 0, 0]) - 0.731_058_578_63).abs() < 1e-10);
/// assert!((y.double_value(&[0, 2, 0]) - 23.0).abs() < 1e-8);
/// # Ok::<(), runtime::Error>(())
/// ```
///
/// # Errors
/// Shapes that do not match; errors of libtorch. In backward, a second derivative.
pub fn causal_conv(
    x: &Tensor,
    weight: &Tensor,
    documents: Option<&Tensor>,
    previous: Option<&Tensor>,
) -> Result<Tensor> {
    let refuse = |name: &str, tensor: &Tensor, expected: String| {
        let reason = format!("`{name}` has shape {:?}; expected {expected}", tensor.size());
        Err(Error::invalid(NAME, reason))
    };
    let &[batch, sequence, channels] = x.size().as_slice() else {
        return refuse("x", x, "[batch, sequence, channels]".to_owned());
    };
    let window = match weight.size()[..] {
        [rows, window] | [rows, 1, window] if rows == channels && window > 0 => window,
        _ => return refuse("weight", weight, format!("[{channels}, window] or [{channels}, 1, window]")),
    };
    if let Some(documents) = documents.filter(|documents| documents.size() != [batch, sequence]) {
        return refuse("documents", documents, format!("[{batch}, {sequence}]"));
    }
    let before = [batch, window - 1, channels];
    if let Some(previous) = previous.filter(|previous| previous.size() != before) {
        return refuse("previous", previous, format!("{before:?}"));
    }
    let function = Convolution::new(window, documents, previous);
    let [y] = autograd::apply(function, &[x, weight])?;
    Ok(y)
}
