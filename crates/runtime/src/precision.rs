//! Where mixed precision takes hold of a model.
//!
//! A block asks here for its products ([`linear`], [`matmul`], [`attend`]; [`operand`] and [`weight`] where it computes them
//! itself) and says where full precision is a must ([`widened`]: before a normalisation, a softmax, a loss). Without a policy each is libtorch's operator and nothing more.
//! With one, the policy decides the dtypes. The policy belongs to the thread, as grad mode does: [`enter`] sets it until its
//! guard is dropped, also by a panic; [`checkpoint`](crate::autograd::checkpoint()) captures it in forward and computes
//! again under it, whichever thread of the engine that happens on.
//!
//! ```
//! use std::sync::Arc;
//!
//! use runtime::precision::{self, Policy};
//! use tch::{Kind, Tensor, kind};
//!
//! #[derive(Debug)]
//! struct Doubled;
//! impl Policy for Doubled {
//!     fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> runtime::Result<Tensor> {
//!         let wide = |t: &Tensor| t.to_kind(Kind::Double);
//!         Ok(wide(x).f_linear(&wide(weight), bias.map(wide).as_ref())?)
//!     }
//! }
//!
//! let (x, w) = (Tensor::ones([2, 3], kind::FLOAT_CPU), Tensor::ones([4, 3], kind::FLOAT_CPU));
//! {
//!     let _within = precision::enter(Some(Arc::new(Doubled)));
//!     assert_eq!(precision::linear(&x, &w, None)?.kind(), Kind::Double);
//! }
//! assert_eq!(precision::linear(&x, &w, None)?.kind(), Kind::Float);
//! # Ok::<(), runtime::Error>(())
//! ```

use std::cell::RefCell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

use tch::{Kind, Tensor};

use crate::autograd::retain;
use crate::error::Result;

/// An attention of queries, keys and values, in whatever dtype they come.
pub type Attention<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// Decides in which dtype a model computes. What is left out is computed as without a policy.
pub trait Policy: Debug + Send + Sync {
    /// x·Wᵀ + b; see [`linear`].
    ///
    /// # Errors
    /// Those of libtorch.
    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        retain::linear(x, weight, bias)
    }

    /// a·b; see [`matmul`].
    ///
    /// # Errors
    /// Those of libtorch.
    fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(a.f_matmul(b)?)
    }

    /// See [`attend`].
    ///
    /// # Errors
    /// Those of `attention`.
    fn attend(&self, qkv: [&Tensor; 3], attention: Attention<'_>) -> Result<Tensor> {
        let [q, k, v] = qkv;
        attention(q, k, v)
    }

    /// See [`operand`].
    ///
    /// # Errors
    /// Those of libtorch.
    fn operand(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }

    /// See [`weight`].
    ///
    /// # Errors
    /// Those of libtorch.
    fn weight(&self, weight: &Tensor) -> Result<Tensor> {
        Ok(weight.shallow_clone())
    }

    /// See [`widened_kind`].
    fn widened_kind(&self, kind: Kind) -> Kind {
        kind
    }

    /// A thread begins to compute under this policy. Called as often as [`Policy::left`].
    fn entered(&self) {}

    /// It ends.
    fn left(&self) {}
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<dyn Policy>>> = const { RefCell::new(None) };
}

/// This thread's policy.
pub fn current() -> Option<Arc<dyn Policy>> {
    CURRENT.with_borrow(Clone::clone)
}

/// Sets this thread's policy until the guard is dropped; `None` computes in the dtypes at hand. May nest.
pub fn enter(policy: Option<Arc<dyn Policy>>) -> Entered {
    if let Some(policy) = &policy {
        policy.entered();
    }
    let previous = CURRENT.replace(policy);
    Entered { previous, thread: PhantomData }
}

/// A policy is in place until this is dropped, on the thread that entered it. Guards are dropped in reverse order.
#[derive(Debug)]
#[must_use = "the policy is in place until the guard is dropped"]
pub struct Entered {
    previous: Option<Arc<dyn Policy>>,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(policy) = CURRENT.replace(self.previous.take()) {
            policy.left();
        }
    }
}

/// x·Wᵀ + b over the last dimension: x `[…, in]`, W `[out, in]`, b `[out]`.
///
/// # Errors
/// Those of the policy; of libtorch without one.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.linear(x, weight, bias),
        None => retain::linear(x, weight, bias),
    }
}

/// a·b, as `Tensor::matmul`.
///
/// # Errors
/// Those of the policy; of libtorch without one.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.matmul(a, b),
        None => Ok(a.f_matmul(b)?),
    }
}

/// `attention` of queries, keys and values: it gets them in the policy's dtype, and its softmax is to be in fp32.
///
/// # Errors
/// Those of `attention` and of the policy.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, attention: Attention<'_>) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.attend([q, k, v], attention),
        None => attention(q, k, v),
    }
}

/// `x` in the dtype that products are computed in: for a function whose backward is written by hand, which computes its
/// products itself. The cast is part of the graph, so the gradient comes back in `x`'s own dtype.
///
/// # Errors
/// Those of libtorch.
pub fn operand(x: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.operand(x),
        None => Ok(x.shallow_clone()),
    }
}

/// [`operand`] for what will be used again unchanged: the policy may keep its cast.
///
/// # Errors
/// Those of libtorch.
pub fn weight(weight: &Tensor) -> Result<Tensor> {
    match current() {
        Some(policy) => policy.weight(weight),
        None => Ok(weight.shallow_clone()),
    }
}

/// `x` as what needs full precision wants it: in fp32 under a policy that computes lower, else as it is.
///
/// # Errors
/// Those of libtorch.
pub fn widened(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(widened_kind(x.kind()))?)
}

/// The dtype in which what needs full precision computes with a tensor of `kind`, for what reads a lower dtype itself and
/// needs no copy ([`fused::norm`](crate::fused::norm)).
pub fn widened_kind(kind: Kind) -> Kind {
    current().map_or(kind, |policy| policy.widened_kind(kind))
}

/// What tells a tensor from every other one that is alive: two handles of one tensor share it, a view or a detached tensor
/// has its own.
///
/// # Errors
/// None in practice; the border's type.
pub fn identity(tensor: &Tensor) -> Result<usize> {
    crate::sys::tensor::identity(tensor)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use tch::{Kind, kind};

    use super::*;
    use crate::autograd::{backward, checkpoint};

    /// Adds its number to every product, and counts its threads.
    #[derive(Debug, Default)]
    struct Marked(f64, AtomicI64);

    impl Policy for Marked {
        fn matmul(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
            Ok(a.f_matmul(b)?.f_add_scalar(self.0)?)
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
    fn policies_nest_are_switched_off_and_come_back_after_a_panic() {
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
    fn what_is_computed_again_is_computed_under_the_same_policy() {
        let policy = Arc::new(Marked(5.0, 0.into()));
        let x = Tensor::ones([1, 1], kind::FLOAT_CPU).set_requires_grad(true);
        let y = {
            let _within = enter(Some(policy.clone()));
            // x ↦ (x·x + 5)², whose slope shows what the second run computed.
            checkpoint(|x| Ok(vec![matmul(&x[0], &x[0])?.f_square()?.f_sum(Kind::Float)?]), &[&x]).unwrap()
        };
        backward(&[&y[0]]).unwrap();
        assert_eq!(x.grad().double_value(&[0, 0]), 2.0 * 6.0 * 2.0);
        assert_eq!(policy.1.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_handle_is_the_same_tensor_and_a_view_is_not() {
        let x = Tensor::ones([2], kind::FLOAT_CPU);
        let same = identity(&x).unwrap();
        assert_eq!(identity(&x.shallow_clone()).unwrap(), same);
        assert_ne!(identity(&x.detach()).unwrap(), same);
        assert_ne!(identity(&x.view([2])).unwrap(), same);
    }
}
