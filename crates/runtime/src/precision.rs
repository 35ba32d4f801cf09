//! The mixed-precision policy of a model.
//!
//! A block computes its products with these functions ([`linear`], [`matmul`], [`attend`]; [`operand`] and [`weight`] if it
//! computes them itself) and marks where it needs full precision ([`widened`]: before a normalisation, a softmax, a loss). Without
//! a policy each is simply libtorch's operator. With one, the policy decides the dtypes. The policy is thread-local, like grad
//! mode: [`enter`] sets it until its guard is dropped, also by a panic; [`checkpoint`](crate::autograd::checkpoint()) captures it
//! in forward and recomputes under it, on any thread of the engine.
//!
//! ```
//! use std::sync::Arc;
//!
//! use runtime::precision::{self, Policy, Product};
//! use tch::{Kind, Tensor, kind};
//!
//! #[derive(Debug)]
//! struct Doubled;
//! impl Policy for Doubled {
//!     fn linear(&self, x: &Tensor, w: &Tensor, b: Option<&Tensor>, product: Product<'_>) -> runtime::Result<Tensor> {
//!         let wide = |t: &Tensor| t.to_kind(Kind::Double);
//!         product(&wide(x), &wide(w), b.map(wide).as_ref())
//!     }
//! }
//!
//! let product = |x: &Tensor, w: &Tensor, b: Option<&Tensor>| Ok(x.f_linear(w, b)?);
//! let (x, w) = (Tensor::ones([2, 3], kind::FLOAT_CPU), Tensor::ones([4, 3], kind::FLOAT_CPU));
//! {
//!     let _within = precision::enter(Some(Arc::new(Doubled)));
//!     assert_eq!(precision::linear(&x, &w, None, &product)?.kind(), Kind::Double);
//! }
//! assert_eq!(precision::linear(&x, &w, None, &product)?.kind(), Kind::Float);
//! # Ok::<(), runtime::Error>(())
//! ```

use std::cell::RefCell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::error::Result;

/// An attention of queries, keys and values, of any dtype.
pub type Attention<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// A linear layer of x, W and b of any dtype.
pub type Product<'a> = &'a dyn Fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;

/// Decides in which dtypes a model computes. The default methods compute as without a policy.
pub trait Policy: Debug + Send + Sync {
    /// x·Wᵀ + b; see [`linear`].
    ///
    /// # Errors
    /// Errors of `product`.
    fn linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        product: Product<'_>,
    ) -> Result<Tensor> {
        product(x, weight, bias)
    }

    /// a·b; see [`matmul`].
    ///
    /// # Errors
    /// Errors of libtorch.
    fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(a.f_matmul(b)?)
    }

    /// See [`attend`].
    ///
    /// # Errors
    /// Errors of `attention`.
    fn attend(&self, qkv: [&Tensor; 3], attention: Attention<'_>) -> Result<Tensor> {
        let [q, k, v] = qkv;
        attention(q, k, v)
    }

    /// See [`operand`].
    ///
    /// # Errors
    /// Errors of libtorch.
    fn operand(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }

    /// See [`weight`].
    ///
    /// # Errors
    /// Errors of libtorch.
    fn weight(&self, weight: &Tensor) -> Result<Tensor> {
        Ok(weight.shallow_clone())
    }

    /// See [`widened_kind`].
    fn widened_kind(&self, kind: Kind) -> Kind {
        kind
    }

    /// Returns the same policy without memory of the weights that it has seen; `None` if it has none.
    fn uncached(&self) -> Option<Arc<dyn Policy>> {
        None
    }

    /// Called when a thread enters this policy; each call has a matching [`Policy::left`].
    fn entered(&self) {}

    /// Called when a thread leaves this policy.
    fn left(&self) {}
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn Policy>>> = const { RefCell::new(None) };
}

/// Returns whether this thread has a policy.
pub fn is_set() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Returns this thread's policy.
pub fn current() -> Option<Arc<dyn Policy>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Sets this thread's policy until the guard is dropped; `None` computes in the tensors' own dtypes. May nest.
pub fn enter(policy: Option<Arc<dyn Policy>>) -> PolicyGuard {
    if let Some(policy) = &policy {
        policy.entered();
    }
    let previous = CURRENT.replace(policy);
    PolicyGuard { previous, thread: PhantomData }
}

/// Makes this thread's policy cache nothing until the guard is dropped, for code that computes with tensors made for one use. Its
/// graphs and recomputed segments cache nothing either.
pub fn uncached() -> Option<PolicyGuard> {
    let policy = current()?.uncached()?;
    Some(enter(Some(policy)))
}

/// A guard of this thread's policy. Drop guards in reverse order.
#[derive(Debug)]
#[must_use = "the policy is in place until the guard is dropped"]
pub struct PolicyGuard {
    previous: Option<Arc<dyn Policy>>,
    thread: PhantomData<*const ()>,
}

impl Drop for PolicyGuard {
    fn drop(&mut self) {
        if let Some(policy) = CURRENT.replace(self.previous.take()) {
            policy.left();
        }
    }
}

/// Computes x·Wᵀ + b over the last dimension, x `[…, in]`, W `[out, in]`, b `[out]`, by `product` in the policy's dtype.
///
/// # Errors
/// Errors of `product` and of the policy.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, product: Product<'_>) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.linear(x, weight, bias, product),
        None => product(x, weight, bias),
    }
}

/// Computes a·b, as `Tensor::matmul`.
///
/// # Errors
/// Errors of the policy; of libtorch without one.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.matmul(a, b),
        None => Ok(a.f_matmul(b)?),
    }
}

/// Calls `attention` with queries, keys and values in the policy's dtype; it must compute its softmax in fp32.
///
/// # Errors
/// Errors of `attention` and of the policy.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, attention: Attention<'_>) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.attend([q, k, v], attention),
        None => attention(q, k, v),
    }
}

/// Casts `x` to the dtype of products, for a function that computes its products itself. The cast is part of the graph,
/// so the gradient has `x`'s own dtype.
///
/// # Errors
/// Errors of libtorch.
pub fn operand(x: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.operand(x),
        None => Ok(x.shallow_clone()),
    }
}

/// As [`operand`], for tensors that are used repeatedly: the policy may cache the cast.
///
/// # Errors
/// Errors of libtorch.
pub fn weight(weight: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.weight(weight),
        None => Ok(weight.shallow_clone()),
    }
}

/// Casts `x` for an operation that needs full precision: to fp32 under a low-precision policy; otherwise returns it
/// unchanged.
///
/// # Errors
/// Errors of libtorch.
pub fn widened(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(widened_kind(x.kind()))?)
}

/// Returns the dtype in which an operation that needs full precision computes with a tensor of `kind`, for kernels that convert
/// while reading, as the fused norms do.
pub fn widened_kind(kind: Kind) -> Kind {
    current().map_or(kind, |policy| policy.widened_kind(kind))
}

/// Returns an identity that is unique among live tensors: two handles of one tensor share it, a view or a detached tensor has its
/// own.
///
/// # Errors
/// Never fails; `Result` for uniformity.
pub fn identity(tensor: &Tensor) -> Result<usize> {
    crate::sys::tensor::identity(tensor)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use tch::{Kind, kind};

    use super::*;
    use crate::autograd::{backward, checkpoint};
    use crate::ops::TryScalar;

    /// Adds its number to every product, and counts its threads.
    #[derive(Debug, Default)]
    struct Marked(f64, AtomicI64);

    impl Policy for Marked {
        fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
            Ok(a.f_matmul(b)?.try_add_scalar(self.0)?)
        }
        fn entered(&self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        fn left(&self) {
            self.1.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn product() -> f64 {
        let one = Tensor::ones([1, 1], kind::FLOAT_CPU);
        matmul(&one, &one).unwrap().double_value(&[0, 0])
    }

    #[test]
    fn policies_nest_and_are_restored_after_a_panic() {
        let (outer, inner) = (Arc::new(Marked(10.0, 0.into())), Arc::new(Marked(20.0, 0.into())));
        assert_eq!(product(), 1.0);
        {
            let _outer = enter(Some(outer.clone()));
            assert_eq!(product(), 11.0);
            {
                let _inner = enter(Some(inner.clone()));
                assert_eq!(product(), 21.0);
                let _off = enter(None);
                assert_eq!(product(), 1.0);
            }
            let panicked = std::panic::catch_unwind(|| {
                let _inner = enter(Some(inner.clone()));
                panic!("within");
            });
            assert!(panicked.is_err());
            assert_eq!(product(), 11.0);
            let elsewhere = std::thread::spawn(product).join().unwrap();
            assert_eq!(elsewhere, 1.0, "another thread has its own");
        }
        assert_eq!(product(), 1.0);
        assert_eq!((outer.1.load(Ordering::SeqCst), inner.1.load(Ordering::SeqCst)), (0, 0));
    }

    #[test]
    fn recomputation_uses_the_policy_of_forward() {
        let policy = Arc::new(Marked(5.0, 0.into()));
        let x = Tensor::ones([1, 1], kind::FLOAT_CPU).set_requires_grad(true);
        let y = {
            let _within = enter(Some(policy.clone()));
            // x ↦ (x·x + 5)², whose slope shows what the second run computed.
            checkpoint(|[x]| Ok([matmul(x, x)?.f_square()?.f_sum(Kind::Float)?]), [&x]).unwrap()
        };
        backward(&[&y[0]]).unwrap();
        assert_eq!(x.grad().double_value(&[0, 0]), 2.0 * 6.0 * 2.0);
        assert_eq!(policy.1.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn handles_share_an_identity_and_views_do_not() {
        let x = Tensor::ones([2], kind::FLOAT_CPU);
        let same = identity(&x).unwrap();
        assert_eq!(identity(&x.shallow_clone()).unwrap(), same);
        assert_ne!(identity(&x.detach()).unwrap(), same);
        assert_ne!(identity(&x.view([2])).unwrap(), same);
    }
}
