//! Parts that outlive the borrow of their model, and that run on other tensors than their own.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::ReentrantMutex;
use runtime::autograd::GradMode;
use tch::Tensor;

use super::{
    Block, Context, Mlp, Module, ModuleMapper, Role, Visitor, VisitorMut, identity, map_modules, tensors,
};
use crate::error::{Error, Result};

/// A part behind a lock, for techniques that wrap it: a graph may hold on to it after the borrow of the model, and its backward may
/// run it on another thread, while tensors are not `Sync`. The same thread may take the lock again.
#[derive(Debug)]
pub struct FunctionalCall<P: ?Sized> {
    name: String,
    part: SharedModule<P>,
    /// Handles of the part's tensors, for those who only read the model: the same tensors, gradients and all.
    named: Vec<(String, Tensor, Role)>,
}

/// The part of a [`FunctionalCall`], from anywhere.
#[derive(Debug)]
pub struct SharedModule<P: ?Sized>(Arc<ReentrantMutex<RefCell<Box<P>>>>);

impl<P: ?Sized> Clone for SharedModule<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Module + ?Sized> FunctionalCall<P> {
    /// Takes a part; `name` is what errors call it.
    pub fn new(name: &str, part: Box<P>) -> Self {
        let named = handles(&*part);
        Self {
            name: name.to_owned(),
            part: SharedModule(Arc::new(ReentrantMutex::new(RefCell::new(part)))),
            named,
        }
    }

    /// The part again, for who changed their mind.
    ///
    /// # Errors
    /// This itself, where a graph or a run still holds the part.
    pub fn into_inner(self) -> std::result::Result<Box<P>, Self> {
        let Self { name, part, named } = self;
        match Arc::try_unwrap(part.0) {
            Ok(part) => Ok(part.into_inner().into_inner()),
            Err(part) => Err(Self { name, part: SharedModule(part), named }),
        }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tensors with their names, each once.
    pub fn named(&self) -> &[(String, Tensor, Role)] {
        &self.named
    }

    /// The part, for a closure that outlives this borrow.
    pub fn shared(&self) -> SharedModule<P> {
        self.part.clone()
    }

    /// The part's own [`Module::visit`], but that a tensor which it has twice comes once.
    pub fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for (name, tensor, role) in &self.named {
            match role {
                Role::Parameter => visitor.parameter(name, tensor),
                Role::Buffer => visitor.buffer(name, tensor),
            }
        }
    }

    /// The part's own [`Module::visit_mut`].
    ///
    /// # Errors
    /// A part that a graph or a run still holds; those of the mapper.
    pub fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        let part = Arc::get_mut(&mut self.part.0).ok_or_else(|| Error::Config {
            what: "model",
            reason: format!(
                "a graph whose backward has not run holds `{}`; run backward, or drop the loss, before the model is changed",
                self.name
            ),
        })?;
        let part = part.get_mut().get_mut();
        let result = part.visit_mut(visitor);
        self.named = handles(&**part);
        result
    }

    /// Whether a run on `x` is worth running again: gradients are recorded, and something in it needs one.
    pub fn records(&self, x: &Tensor) -> bool {
        GradMode::enabled()
            && (x.requires_grad() || self.named.iter().any(|(_, tensor, _)| tensor.requires_grad()))
    }
}

impl<P: Module + ?Sized> SharedModule<P> {
    /// Runs something on the part.
    pub fn run<R>(&self, body: impl FnOnce(&P) -> R) -> R {
        body(&**self.0.lock().borrow())
    }

    /// Runs something on the part while it has `others` in the place of its tensors: one for each of [`FunctionalCall::named`], in that order.
    /// Its own are back when this returns or panics. A tensor that it has twice is replaced twice.
    ///
    /// # Errors
    /// Another number of tensors; a part that is running; those of `body`.
    pub fn functional_call<R>(&self, others: &[Tensor], body: impl FnOnce(&P) -> Result<R>) -> Result<R> {
        let part = self.0.lock();
        let _own = Replaced { own: exchange(&part, others)?, part: &part };
        body(&**part.borrow())
    }
}

/// Puts the part's own tensors back.
struct Replaced<'a, P: Module + ?Sized> {
    part: &'a RefCell<Box<P>>,
    own: Vec<Tensor>,
}

impl<P: Module + ?Sized> Drop for Replaced<'_, P> {
    fn drop(&mut self) {
        let mut own = std::mem::take(&mut self.own).into_iter();
        let mut back = Each(|slot: &mut Tensor| {
            if let Some(tensor) = own.next() {
                *slot = tensor;
            }
        });
        // The way through the part was open when the tensors were taken out, and nothing has changed its shape since.
        if let Ok(mut part) = self.part.try_borrow_mut() {
            let _ = map_modules(&mut **part, &mut back);
        }
    }
}

/// Puts `others` into the part's slots, and gives what was in each slot.
fn exchange<P: Module + ?Sized>(part: &RefCell<Box<P>>, others: &[Tensor]) -> Result<Vec<Tensor>> {
    let refuse = |reason: String| Error::Config { what: "model part", reason };
    let mut part = part
        .try_borrow_mut()
        .map_err(|_| refuse("is running already; a part cannot run inside itself on other tensors".into()))?;
    // The same tensor in several slots gets the same replacement.
    let mut known = Vec::new();
    let (mut own, mut places) = (Vec::new(), Vec::new());
    let mut look = Each(|slot: &mut Tensor| {
        let identity = identity(slot);
        let place = known.iter().position(|other| *other == identity).unwrap_or_else(|| {
            known.push(identity);
            known.len() - 1
        });
        places.push(place);
        own.push(slot.shallow_clone());
    });
    map_modules(&mut **part, &mut look)?;
    if known.len() != others.len() {
        return Err(refuse(format!(
            "{} tensors in the place of {}; give one for each",
            others.len(),
            known.len()
        )));
    }
    let mut places = places.into_iter();
    let mut put = Each(|slot: &mut Tensor| {
        if let Some(place) = places.next() {
            *slot = others[place].shallow_clone();
        }
    });
    map_modules(&mut **part, &mut put)?;
    Ok(own)
}

/// Something done at every tensor.
struct Each<F>(F);

impl<F: FnMut(&mut Tensor)> ModuleMapper for Each<F> {
    fn tensor(&mut self, _: &str, tensor: &mut Tensor, _: Role) -> Result<()> {
        (self.0)(tensor);
        Ok(())
    }
}

fn handles(part: &(impl Module + ?Sized)) -> Vec<(String, Tensor, Role)> {
    tensors(part).into_iter().map(|named| (named.name, named.tensor.shallow_clone(), named.role)).collect()
}

/// Takes the block out of a slot of a model, for a technique that puts it back inside a wrapper of its own.
pub fn take_block(slot: &mut Box<dyn Block>) -> Box<dyn Block> {
    std::mem::replace(slot, Box::new(Vacant))
}

/// Takes the MLP out of a slot, as [`take_block`].
pub fn take_mlp(slot: &mut Box<dyn Mlp>) -> Box<dyn Mlp> {
    std::mem::replace(slot, Box::new(Vacant))
}

/// What is in a slot while its part is taken out.
#[derive(Debug)]
struct Vacant;

impl Module for Vacant {
    fn visit<'a>(&'a self, _: &mut Visitor<'a, '_>) {}

    fn visit_mut(&mut self, _: &mut VisitorMut<'_>) -> Result<()> {
        Ok(())
    }
}

impl Block for Vacant {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}

impl Mlp for Vacant {
    fn forward(&self, x: &Tensor, _: &Context<'_>) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}
