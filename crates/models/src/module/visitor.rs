//! Passes over a module's tensors and replaceable parts.

use std::fmt::Debug;

use tch::Tensor;

use super::{Attention, Block, LossHead, Mlp, Module, Projection};
use crate::embedding::Embedding;
use crate::error::Result;
use crate::mixture::ExpertSlot;

/// The role of a tensor in its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A trainable tensor.
    Parameter,
    /// A tensor of the state that is not trained.
    Buffer,
}

/// Visits the tensors of a module.
pub struct Visitor<'a, 'f> {
    path: String,
    found: &'f mut dyn FnMut(&str, &'a Tensor, Role),
}

impl<'a, 'f> Visitor<'a, 'f> {
    pub(super) fn new(found: &'f mut dyn FnMut(&str, &'a Tensor, Role)) -> Self {
        Self { path: String::new(), found }
    }

    /// Visits a parameter.
    pub fn parameter(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Parameter);
    }

    /// Visits an optional parameter.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&'a Tensor>) {
        if let Some(tensor) = tensor {
            self.parameter(name, tensor);
        }
    }

    /// Visits a buffer.
    pub fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
        self.tensor(name, tensor, Role::Buffer);
    }

    /// Visits a submodule. With an empty name its tensors appear beside those of this module.
    pub fn part(&mut self, name: &str, part: &'a (impl Module + ?Sized)) {
        let length = enter(&mut self.path, name);
        part.visit(self);
        self.path.truncate(length);
    }

    fn tensor(&mut self, name: &str, tensor: &'a Tensor, role: Role) {
        let length = enter(&mut self.path, name);
        (self.found)(&self.path, tensor, role);
        self.path.truncate(length);
    }
}

/// Changes tensors and replaces parts of a model; see [`map_modules`]. Each method does nothing by default. After a part is replaced,
/// the new part is visited.
#[allow(unused_variables, reason = "the defaults do nothing with what they get")]
pub trait ModuleMapper {
    /// A tensor.
    ///
    /// # Errors
    /// The mapper's own.
    fn tensor(&mut self, name: &str, tensor: &mut Tensor, role: Role) -> Result<()> {
        Ok(())
    }
    /// A projection.
    ///
    /// # Errors
    /// The mapper's own.
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> Result<()> {
        Ok(())
    }
    /// An attention.
    ///
    /// # Errors
    /// The mapper's own.
    fn attention(&mut self, name: &str, slot: &mut Box<dyn Attention>) -> Result<()> {
        Ok(())
    }
    /// An MLP.
    ///
    /// # Errors
    /// The mapper's own.
    fn mlp(&mut self, name: &str, slot: &mut Box<dyn Mlp>) -> Result<()> {
        Ok(())
    }
    /// A block.
    ///
    /// # Errors
    /// The mapper's own.
    fn block(&mut self, name: &str, slot: &mut Box<dyn Block>) -> Result<()> {
        Ok(())
    }
    /// An embedding.
    ///
    /// # Errors
    /// The mapper's own.
    fn embedding(&mut self, name: &str, embedding: &mut Embedding) -> Result<()> {
        Ok(())
    }
    /// A loss head.
    ///
    /// # Errors
    /// The mapper's own.
    fn loss_head(&mut self, name: &str, slot: &mut Box<dyn LossHead>) -> Result<()> {
        Ok(())
    }
    /// The experts of a mixture: gate, up and down of each, in the order of their numbers.
    ///
    /// # Errors
    /// The mapper's own.
    fn experts(&mut self, name: &str, matrices: &[[Tensor; 3]], slot: &mut ExpertSlot) -> Result<()> {
        Ok(())
    }
}

/// Applies a [`ModuleMapper`] to a module.
pub struct VisitorMut<'e> {
    path: String,
    mapper: &'e mut dyn ModuleMapper,
}

macro_rules! slots {
    ($($(#[$doc:meta])* $name:ident: $part:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// Errors of the mapper.
        pub fn $name(&mut self, name: &str, slot: &mut Box<dyn $part>) -> Result<()> {
            let length = enter(&mut self.path, name);
            let result = self.mapper.$name(&self.path, slot).and_then(|()| slot.visit_mut(self));
            self.path.truncate(length);
            result
        }
    )*};
}

impl VisitorMut<'_> {
    slots! {
        /// A replaceable projection.
        projection: Projection;
        /// A replaceable attention.
        attention: Attention;
        /// A replaceable MLP.
        mlp: Mlp;
        /// A replaceable block.
        block: Block;
        /// A replaceable loss head.
        loss_head: LossHead;
    }

    /// Visits the experts of a mixture, whose matrices were visited as parts.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn experts(&mut self, name: &str, matrices: &[[Tensor; 3]], slot: &mut ExpertSlot) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = self.mapper.experts(&self.path, matrices, slot);
        self.path.truncate(length);
        result
    }

    /// Visits a parameter.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn parameter(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Parameter)
    }

    /// Visits an optional parameter.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn optional_parameter(&mut self, name: &str, tensor: Option<&mut Tensor>) -> Result<()> {
        tensor.map_or(Ok(()), |tensor| self.parameter(name, tensor))
    }

    /// Visits a buffer.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn buffer(&mut self, name: &str, tensor: &mut Tensor) -> Result<()> {
        self.tensor(name, tensor, Role::Buffer)
    }

    /// Visits an embedding.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn embedding(&mut self, name: &str, embedding: &mut Embedding) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = self.mapper.embedding(&self.path, embedding).and_then(|()| embedding.visit_mut(self));
        self.path.truncate(length);
        result
    }

    /// Visits a part that cannot be replaced.
    ///
    /// # Errors
    /// Errors of the mapper.
    pub fn part(&mut self, name: &str, part: &mut (impl Module + ?Sized)) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = part.visit_mut(self);
        self.path.truncate(length);
        result
    }

    fn tensor(&mut self, name: &str, tensor: &mut Tensor, role: Role) -> Result<()> {
        let length = enter(&mut self.path, name);
        let result = self.mapper.tensor(&self.path, tensor, role);
        self.path.truncate(length);
        result
    }
}

/// Appends a name to a path, and returns the length before.
fn enter(path: &mut String, name: &str) -> usize {
    let length = path.len();
    if !path.is_empty() && !name.is_empty() {
        path.push('.');
    }
    path.push_str(name);
    length
}

/// Applies `mapper` to every tensor and replaceable part of `module`.
///
/// # Errors
/// Errors of the mapper.
pub fn map_modules(module: &mut (impl Module + ?Sized), mapper: &mut dyn ModuleMapper) -> Result<()> {
    module.visit_mut(&mut VisitorMut { path: String::new(), mapper })
}

impl Debug for Visitor<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Visitor").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Debug for VisitorMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VisitorMut").field("path", &self.path).finish_non_exhaustive()
    }
}
