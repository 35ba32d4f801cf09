//! Replacing a part by a wrapper around it.

use tch::Tensor;

use super::{Attention, Block, Context, Mlp, Module, Visitor, VisitorMut};
use crate::error::{Error, Result};

/// Replaces the block in `slot` by what `wrap` makes of it.
pub fn replace_block(slot: &mut Box<dyn Block>, wrap: impl FnOnce(Box<dyn Block>) -> Box<dyn Block>) {
    *slot = wrap(std::mem::replace(slot, Box::new(Vacant)));
}

/// [`replace_block`] with a `wrap` that can fail. With its error it returns a block for the slot, usually the one that it got, so that
/// the model keeps working.
///
/// # Errors
/// Those of `wrap`.
pub fn try_replace_block<E>(
    slot: &mut Box<dyn Block>,
    wrap: impl FnOnce(Box<dyn Block>) -> std::result::Result<Box<dyn Block>, (Box<dyn Block>, E)>,
) -> std::result::Result<(), E> {
    let block = std::mem::replace(slot, Box::new(Vacant));
    match wrap(block) {
        Ok(block) => *slot = block,
        Err((block, error)) => {
            *slot = block;
            return Err(error);
        }
    }
    Ok(())
}

/// Replaces the MLP in `slot` by what `wrap` makes of it.
pub fn replace_mlp(slot: &mut Box<dyn Mlp>, wrap: impl FnOnce(Box<dyn Mlp>) -> Box<dyn Mlp>) {
    *slot = wrap(std::mem::replace(slot, Box::new(Vacant)));
}

/// Replaces the attention in `slot` by what `wrap` makes of it.
pub fn replace_attention(
    slot: &mut Box<dyn Attention>,
    wrap: impl FnOnce(Box<dyn Attention>) -> Box<dyn Attention>,
) {
    *slot = wrap(std::mem::replace(slot, Box::new(Vacant)));
}

/// Occupies a slot while its part is being wrapped. It stays only if the wrapping panics, and then every forward fails.
#[derive(Debug)]
struct Vacant;

fn vacant() -> Error {
    let reason = "a part is missing because wrapping it panicked; load the model again".to_owned();
    Error::Config { what: "model", reason }
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
}

impl Attention for Vacant {
    fn forward(&self, _: &Tensor, _: &Context<'_>) -> Result<Tensor> {
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
        assert_eq!(try_replace_block(&mut slot, |block| Err((block, "refused"))), Err("refused"));
        assert!(slot.forward(&x, &Context::default()).is_ok());

        let panics = || replace_block(&mut slot, |_| panic!("a bug"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let error = slot.forward(&x, &Context::default()).unwrap_err().to_string();
        assert_eq!(error, "model: a part is missing because wrapping it panicked; load the model again");
    }
}
