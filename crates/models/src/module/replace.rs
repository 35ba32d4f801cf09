//! Replacing a part by a wrapper around it.

use tch::Tensor;

use super::{Attention, Block, Context, Mlp, Module, Visitor, VisitorMut};
use crate::error::{Error, Result};

/// A kind of part that [`replace`] can wrap: `dyn Block`, `dyn Attention`, `dyn Mlp`.
pub trait Replaceable {
    /// Returns what occupies a slot while its part is being wrapped: every use of it is an error.
    fn vacant() -> Box<Self>;
}

impl Replaceable for dyn Block {
    fn vacant() -> Box<Self> {
        Box::new(Vacant)
    }
}

impl Replaceable for dyn Attention {
    fn vacant() -> Box<Self> {
        Box::new(Vacant)
    }
}

impl Replaceable for dyn Mlp {
    fn vacant() -> Box<Self> {
        Box::new(Vacant)
    }
}

/// Replaces the part in `slot` by what `wrap` makes of it.
pub fn replace<P: Replaceable + ?Sized>(slot: &mut Box<P>, wrap: impl FnOnce(Box<P>) -> Box<P>) {
    *slot = wrap(std::mem::replace(slot, P::vacant()));
}

/// [`replace`] with a `wrap` that can fail. With its error it returns a part for the slot, usually the one that it got, so that
/// the model keeps working.
///
/// # Errors
/// Errors of `wrap`.
pub fn try_replace<P: Replaceable + ?Sized, E>(
    slot: &mut Box<P>,
    wrap: impl FnOnce(Box<P>) -> std::result::Result<Box<P>, (Box<P>, E)>,
) -> std::result::Result<(), E> {
    match wrap(std::mem::replace(slot, P::vacant())) {
        Ok(part) => *slot = part,
        Err((part, error)) => {
            *slot = part;
            return Err(error);
        }
    }
    Ok(())
}

/// Occupies a slot while its part is being wrapped. It stays only if the wrapping panics, and then every forward fails.
#[derive(Debug)]
struct Vacant;

fn vacant() -> Error {
    let reason = "a part is missing because wrapping it panicked; load the model again".to_owned();
    Error::invalid("model", reason)
}

impl Module for Vacant {
    fn visit<'a>(&'a self, _: &mut Visitor<'a, '_>) {}

    fn visit_mut(&mut self, _: &mut VisitorMut<'_>) -> Result<()> {
        Err(vacant())
    }
}

impl Block for Vacant {
    fn forward(&self, _: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Err(vacant())
    }

    fn forward_with(&self, _: &[&Tensor], _: &Context<'_>) -> Result<Vec<Tensor>> {
        Err(vacant())
    }
}

impl Attention for Vacant {
    fn forward(&self, _: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Err(vacant())
    }

    fn forward_with(&self, _: &[&Tensor], _: &Context<'_>) -> Result<Vec<Tensor>> {
        Err(vacant())
    }
}

impl Mlp for Vacant {
    fn forward(&self, _: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Err(vacant())
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[derive(Debug)]
    struct Identity;

    impl Module for Identity {
        fn visit<'a>(&'a self, _: &mut Visitor<'a, '_>) {}

        fn visit_mut(&mut self, _: &mut VisitorMut<'_>) -> Result<()> {
            Ok(())
        }
    }

    impl Block for Identity {
        fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
            Ok(x.shallow_clone())
        }
    }

    #[test]
    fn a_failed_wrapping_leaves_the_block_and_a_panic_leaves_an_error() {
        let (x, mut slot): (_, Box<dyn Block>) = (Tensor::from(1.0), Box::new(Identity));
        assert_eq!(try_replace(&mut slot, |block| Err((block, "refused"))), Err("refused"));
        assert!(slot.forward(&x, &Context::default()).is_ok());

        let panics = || replace(&mut slot, |_| panic!("a bug"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let error = slot.forward(&x, &Context::default()).unwrap_err().to_string();
        assert_eq!(error, "model: a part is missing because wrapping it panicked; load the model again");
    }
}
