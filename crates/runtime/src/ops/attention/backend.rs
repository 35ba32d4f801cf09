//! The kernels of libtorch's `scaled_dot_product_attention` on a GPU, and the order in which it tries them.
//!
//! libtorch uses the first backend of [`order`] that takes the operands; the order belongs to the process. The first attention on a GPU
//! puts cuDNN first on GPUs where it is usually the fastest (compute capability 9 and 10), whatever the order was before: set another one
//! after it. On the CPU the order has no effect.

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ops::{Value, call};
use crate::sys::ops as sys;

/// A kernel of attention. The numbers are libtorch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// Products and a softmax: the scores are in memory.
    Math = 0,
    /// FlashAttention-2 (Dao, arXiv:2307.08691): 16-bit dtypes; without masks but the causal one on a GPU.
    Flash = 1,
    /// Memory-efficient attention (Rabe & Staats, arXiv:2112.05682; xFormers' kernel): also fp32.
    Efficient = 2,
    /// cuDNN's: 16-bit dtypes.
    CuDnn = 3,
    /// That of a device outside libtorch.
    Overrideable = 4,
}

impl Backend {
    /// All of them, in the order in which libtorch tries them before the first attention on a GPU.
    pub const ALL: [Self; 5] = [Self::Flash, Self::Efficient, Self::Math, Self::CuDnn, Self::Overrideable];

    /// Returns the name in options and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::Flash => "flash",
            Self::Efficient => "efficient",
            Self::CuDnn => "cudnn",
            Self::Overrideable => "overrideable",
        }
    }

    /// Returns the backend of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|backend| backend.name() == name)
    }

    fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|backend| *backend as i64 == number)
    }
}

/// Returns the order in which libtorch tries the backends.
///
/// # Errors
/// [`Error::Invalid`] in a libtorch with other backends.
pub fn order() -> Result<[Backend; 5]> {
    let numbers: [i64; 5] = sys::attention_order()?;
    let mut order = Backend::ALL;
    for (backend, number) in order.iter_mut().zip(numbers) {
        *backend = Backend::from_number(number).ok_or_else(|| {
            Error::invalid("attention backends", format!("libtorch has an unknown backend, number {number}"))
        })?;
    }
    Ok(order)
}

/// Sets the order in which libtorch tries the backends, for the whole process.
///
/// # Errors
/// [`Error::Invalid`] for a backend that is there twice.
pub fn set_order(order: [Backend; 5]) -> Result<()> {
    if let Some(missing) = Backend::ALL.into_iter().find(|backend| !order.contains(backend)) {
        let reason = format!("the order {order:?} lacks {missing:?}; expected each backend once");
        return Err(Error::invalid("attention backends", reason));
    }
    sys::set_attention_order(&order.map(|backend| backend as i64))
}

/// Returns the order that begins with `first`, and has the others as before.
pub fn beginning_with(first: Backend, order: [Backend; 5]) -> [Backend; 5] {
    let mut result = order;
    let others = order.into_iter().filter(|backend| *backend != first);
    for (place, backend) in result.iter_mut().zip(std::iter::once(first).chain(others)) {
        *place = backend;
    }
    result
}

/// What decides the backend besides the operands.
#[derive(Debug, Clone, Copy, Default)]
pub struct Call<'a> {
    /// The mask, bool or added to the scores; causal without one.
    pub mask: Option<&'a Tensor>,
    /// Probability that a weight is dropped.
    pub dropout: f64,
    /// Factor of the scores; 1/√head if absent.
    pub scale: Option<f64>,
}

/// Returns the backend that libtorch's `scaled_dot_product_attention` would use for q `[batch, heads, sequence, head]`, k and v `[batch,
/// kv_heads, keys, head]`; `None` if none takes them.
///
/// # Errors
/// Errors of libtorch.
pub fn chosen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    Call { mask, dropout, scale }: Call<'_>,
) -> Result<Option<Backend>> {
    let grouped = q.size().get(1) != k.size().get(1);
    let arguments = [q.into(), k.into(), v.into(), mask.into(), dropout.into(), mask.is_none().into()];
    let named = [("scale", scale.into()), ("enable_gqa", grouped.into())];
    let chosen = call("aten::_fused_sdp_choice", "", &arguments, &named)?;
    Ok(chosen.first().and_then(|value| match value {
        Value::Int(number) => Backend::from_number(*number),
        _ => None,
    }))
}
