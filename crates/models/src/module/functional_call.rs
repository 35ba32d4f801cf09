//! Parts that a graph can hold, and that can run with other tensors than their own.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::ReentrantMutex;
use runtime::autograd::GradMode;
use tch::Tensor;

use super::named_tensors::identity;
use super::{Block, Context, Module, ModuleMapper, Role, Visitor, VisitorMut, map_modules, tensors};
use crate::error::{Error, Result};

/// Owns a part behind a lock, for techniques that wrap it. A graph may keep the part alive after the borrow of the model ends, and a
/// backward may run it on another thread, while tensors are not `Sync`. The lock is reentrant.
#[derive(Debug)]
pub struct FunctionalCall<P: ?Sized> {
    name: String,
    part: SharedModule<P>,
    /// Handles of the part's tensors, for visitors: the same tensors, with their gradients.
    named: Vec<(String, Tensor, Role)>,
}

/// A shared handle on the part of a [`FunctionalCall`].
#[derive(Debug)]
pub struct SharedModule<P: ?Sized>(Arc<ReentrantMutex<RefCell<Slot<P>>>>);

#[derive(Debug)]
struct Slot<P: ?Sized> {
    part: Box<P>,
    /// The part's own tensors, where the last call could not restore them.
    unrestored: Vec<Tensor>,
}

impl<P: ?Sized> Clone for SharedModule<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Module + ?Sized> FunctionalCall<P> {
    /// Takes ownership of a part; errors call it `name`.
    pub fn new(name: &str, part: Box<P>) -> Self {
        let named = handles(&*part);
        let slot = Slot { part, unrestored: Vec::new() };
        Self {
            name: name.to_owned(),
            part: SharedModule(Arc::new(ReentrantMutex::new(RefCell::new(slot)))),
            named,
        }
    }

    /// Returns the part.
    ///
    /// # Errors
    /// `self`, if a graph or a call still holds the part.
    pub fn into_inner(self) -> std::result::Result<Box<P>, Self> {
        let Self { name, part, named } = self;
        match Arc::try_unwrap(part.0) {
            Ok(slot) => {
                let mut slot = slot.into_inner().into_inner();
                let _ = slot.restore();
                Ok(slot.part)
            }
            Err(part) => Err(Self { name, part: SharedModule(part), named }),
        }
    }

    /// Returns the part's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the part's tensors with their names; a shared one once.
    pub fn named(&self) -> &[(String, Tensor, Role)] {
        &self.named
    }

    /// Returns a handle on the part, for a closure that outlives this borrow.
    pub fn shared(&self) -> SharedModule<P> {
        self.part.clone()
    }

    /// Returns whether a forward on `values` records a graph: gradients are enabled, and an input or a tensor of the part requires one.
    pub fn records(&self, values: &[&Tensor]) -> bool {
        GradMode::enabled()
            && (values.iter().any(|value| value.requires_grad())
                || self.named.iter().any(|(_, tensor, _)| tensor.requires_grad()))
    }
}

/// Visits the part's tensors, a shared one once. [`Module::visit_mut`] fails while a graph or a call holds the part.
impl<P: Module + ?Sized> Module for FunctionalCall<P> {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        for (name, tensor, role) in &self.named {
            match role {
                Role::Parameter => visitor.parameter(name, tensor),
                Role::Buffer => visitor.buffer(name, tensor),
            }
        }
    }

    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> Result<()> {
        let part = Arc::get_mut(&mut self.part.0).ok_or_else(|| Error::invalid("model", format!(
                "a graph whose backward has not run holds `{}`; run backward, or drop the loss, before the model is changed",
                self.name
            )))?;
        let slot = part.get_mut().get_mut();
        slot.restore()?;
        let result = slot.part.visit_mut(visitor);
        self.named = handles(&*slot.part);
        result
    }
}

impl Block for FunctionalCall<dyn Block> {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        self.part.run(|block| block.forward(x_btd, context))
    }

    fn forward_with(&self, values: &[&Tensor], context: &Context<'_>) -> Result<Vec<Tensor>> {
        self.part.run(|block| block.forward_with(values, context))
    }
}

impl<P: Module + ?Sized> SharedModule<P> {
    /// Runs `body` on the part.
    pub fn run<R>(&self, body: impl FnOnce(&P) -> R) -> R {
        let slot = self.0.lock();
        if let Ok(mut slot) = slot.try_borrow_mut() {
            let _ = slot.restore();
        }
        body(&*slot.borrow().part)
    }

    /// Runs `body` on the part with `others` instead of its own tensors, like `torch.func.functional_call`: one tensor for each of
    /// [`FunctionalCall::named`], in that order. A tensor that the part uses twice is replaced twice.
    ///
    /// The part's own tensors are restored when this returns or panics. If a graph of `body` still holds a part inside this one, as
    /// activation checkpointing does until its backward, that part keeps the call's tensors, with which it is to be recomputed; its
    /// own are restored before the next use.
    ///
    /// # Errors
    /// Another number of tensors; a part that is already running, or inside which a graph of an earlier call holds another; those
    /// of `body`.
    pub fn functional_call<R>(&self, others: &[Tensor], body: impl FnOnce(&P) -> Result<R>) -> Result<R> {
        let slot = self.0.lock();
        let tensors = slot
            .try_borrow_mut()
            .map_err(|_| {
                refuse("is already running; it cannot run inside itself with other tensors".to_owned())
            })?
            .swap_in(others)?;
        let _restored = Own { tensors, slot: &slot };
        body(&*slot.borrow().part)
    }
}

/// Restores the part's own tensors when dropped.
struct Own<'a, P: Module + ?Sized> {
    slot: &'a RefCell<Slot<P>>,
    tensors: Vec<Tensor>,
}

impl<P: Module + ?Sized> Drop for Own<'_, P> {
    fn drop(&mut self) {
        if let Ok(mut slot) = self.slot.try_borrow_mut() {
            slot.unrestored = std::mem::take(&mut self.tensors);
            let _ = slot.restore();
        }
    }
}

impl<P: Module + ?Sized> Slot<P> {
    /// Restores the part's own tensors, if the last call could not.
    fn restore(&mut self) -> Result<()> {
        if !self.unrestored.is_empty() {
            assign(&mut *self.part, &self.unrestored)?;
            self.unrestored.clear();
        }
        Ok(())
    }

    /// Puts `others` into the part's slots, and returns what was in each slot. After an error every slot is as before.
    fn swap_in(&mut self, others: &[Tensor]) -> Result<Vec<Tensor>> {
        self.restore()?;
        // Slots that share a tensor get the same replacement.
        let mut distinct = Vec::new();
        let (mut originals, mut indices) = (Vec::new(), Vec::new());
        let mut look = EachTensor(|slot: &mut Tensor| {
            let identity = identity(slot);
            let index = distinct.iter().position(|other| *other == identity).unwrap_or_else(|| {
                distinct.push(identity);
                distinct.len() - 1
            });
            indices.push(index);
            originals.push(slot.shallow_clone());
        });
        map_modules(&mut *self.part, &mut look)?;
        if distinct.len() != others.len() {
            let reason =
                format!("{} tensors for a part with {}; give one for each", others.len(), distinct.len());
            return Err(refuse(reason));
        }
        let replacements: Vec<Tensor> =
            indices.into_iter().map(|index| others[index].shallow_clone()).collect();
        if let Err(error) = assign(&mut *self.part, &replacements) {
            assign(&mut *self.part, &originals)?;
            return Err(error);
        }
        Ok(originals)
    }
}

/// Writes `tensors` into the part's slots, in order.
fn assign(part: &mut (impl Module + ?Sized), tensors: &[Tensor]) -> Result<()> {
    let mut tensors = tensors.iter();
    let mut write = EachTensor(|slot: &mut Tensor| {
        if let Some(tensor) = tensors.next() {
            *slot = tensor.shallow_clone();
        }
    });
    map_modules(part, &mut write)
}

fn refuse(reason: String) -> Error {
    Error::invalid("model part", reason)
}

/// Calls a function with every tensor.
struct EachTensor<F>(F);

impl<F: FnMut(&mut Tensor)> ModuleMapper for EachTensor<F> {
    fn tensor(&mut self, _: &str, tensor: &mut Tensor, _: Role) -> Result<()> {
        (self.0)(tensor);
        Ok(())
    }
}

fn handles(part: &(impl Module + ?Sized)) -> Vec<(String, Tensor, Role)> {
    tensors(part).into_iter().map(|named| (named.name, named.tensor.shallow_clone(), named.role)).collect()
}
