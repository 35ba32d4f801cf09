//! Parts that a graph can hold, and that can run with other tensors than their own.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::ReentrantMutex;
use runtime::autograd::GradMode;
use tch::Tensor;

use super::{
    Block, Context, Module, ModuleMapper, Role, Visitor, VisitorMut, identity, map_modules, tensors,
};
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
pub struct SharedModule<P: ?Sized>(Arc<ReentrantMutex<RefCell<Box<P>>>>);

impl<P: ?Sized> Clone for SharedModule<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Module + ?Sized> FunctionalCall<P> {
    /// Takes ownership of a part; errors call it `name`.
    pub fn new(name: &str, part: Box<P>) -> Self {
        let named = handles(&*part);
        Self {
            name: name.to_owned(),
            part: SharedModule(Arc::new(ReentrantMutex::new(RefCell::new(part)))),
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
            Ok(part) => Ok(part.into_inner().into_inner()),
            Err(part) => Err(Self { name, part: SharedModule(part), named }),
        }
    }

    /// The part's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The part's tensors with their names; a shared one once.
    pub fn named(&self) -> &[(String, Tensor, Role)] {
        &self.named
    }

    /// Returns a handle on the part, for a closure that outlives this borrow.
    pub fn shared(&self) -> SharedModule<P> {
        self.part.clone()
    }

    /// Whether a forward on `x` records a graph: gradients are enabled, and the input or a tensor of the part requires one.
    pub fn records(&self, x: &Tensor) -> bool {
        GradMode::enabled()
            && (x.requires_grad() || self.named.iter().any(|(_, tensor, _)| tensor.requires_grad()))
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
}

impl Block for FunctionalCall<dyn Block> {
    fn forward(&self, x_btd: &Tensor, context: &Context<'_>) -> Result<Tensor> {
        self.part.run(|block| block.forward(x_btd, context))
    }
}

impl<P: Module + ?Sized> SharedModule<P> {
    /// Runs `body` on the part.
    pub fn run<R>(&self, body: impl FnOnce(&P) -> R) -> R {
        body(&**self.0.lock().borrow())
    }

    /// Runs `body` on the part with `others` instead of its own tensors, like `torch.func.functional_call`: one tensor for each of
    /// [`FunctionalCall::named`], in that order. The part's own tensors are restored when this returns or panics. A tensor that the
    /// part uses twice is replaced twice.
    ///
    /// # Errors
    /// Another number of tensors; a part that is already running; those of `body`. If a graph of `body` still holds a part inside
    /// this one, the own tensors cannot be restored: the error says so, and the part must be loaded again.
    pub fn functional_call<R>(&self, others: &[Tensor], body: impl FnOnce(&P) -> Result<R>) -> Result<R> {
        let part = self.0.lock();
        let mut own = Own { tensors: swap_in(&part, others)?, part: &part };
        let result = body(&**part.borrow());
        own.restore()?;
        result
    }
}

/// Restores the part's own tensors, also in a panic.
struct Own<'a, P: Module + ?Sized> {
    part: &'a RefCell<Box<P>>,
    /// What was in each slot; empty once restored.
    tensors: Vec<Tensor>,
}

impl<P: Module + ?Sized> Own<'_, P> {
    fn restore(&mut self) -> Result<()> {
        let tensors = std::mem::take(&mut self.tensors);
        if tensors.is_empty() {
            return Ok(());
        }
        let mut part = self.part.try_borrow_mut().map_err(|_| refuse("is still running".to_owned()))?;
        assign(&mut **part, tensors).map_err(|cause| {
            refuse(format!(
                "its own tensors could not be restored after a call with others; load it again: {cause}"
            ))
        })
    }
}

impl<P: Module + ?Sized> Drop for Own<'_, P> {
    fn drop(&mut self) {
        let _ = self.restore();
    }
}

/// Puts `others` into the part's slots, and returns what was in each slot. After an error every slot is as before.
fn swap_in<P: Module + ?Sized>(part: &RefCell<Box<P>>, others: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut part = part.try_borrow_mut().map_err(|_| {
        refuse("is already running; it cannot run inside itself with other tensors".to_owned())
    })?;
    // Slots that share a tensor get the same replacement.
    let mut known = Vec::new();
    let (mut own, mut indices) = (Vec::new(), Vec::new());
    let mut look = EachTensor(|slot: &mut Tensor| {
        let identity = identity(slot);
        let index = known.iter().position(|other| *other == identity).unwrap_or_else(|| {
            known.push(identity);
            known.len() - 1
        });
        indices.push(index);
        own.push(slot.shallow_clone());
    });
    map_modules(&mut **part, &mut look)?;
    if known.len() != others.len() {
        return Err(refuse(format!(
            "{} tensors for a part with {}; give one for each",
            others.len(),
            known.len()
        )));
    }
    let replacements = indices.into_iter().map(|index| others[index].shallow_clone()).collect();
    if let Err(error) = assign(&mut **part, replacements) {
        assign(&mut **part, own)?;
        return Err(error);
    }
    Ok(own)
}

/// Writes `tensors` into the part's slots, in order.
fn assign(part: &mut (impl Module + ?Sized), tensors: Vec<Tensor>) -> Result<()> {
    let mut tensors = tensors.into_iter();
    let mut write = EachTensor(|slot: &mut Tensor| {
        if let Some(tensor) = tensors.next() {
            *slot = tensor;
        }
    });
    map_modules(part, &mut write)
}

fn refuse(reason: String) -> Error {
    Error::Config { what: "model part", reason }
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
