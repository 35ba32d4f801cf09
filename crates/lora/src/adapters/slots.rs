//! Changes of the model's own slots and tensors.

use models::module::{LossHead, Module, ModuleMapper, Projection, Role, map_modules};
use models::{Embedding, ExpertSlot, Linear};
use tch::Tensor;

use super::modules_to_save::Whole;
use super::token_rows::{self, TokenParts};
use super::{EmbeddingSite, ExpertSite, Site};
use crate::error::Result;

/// Installs the adapted projections, the rows of tokens, and the tensors that are trained as a whole.
pub(super) fn put_in(
    model: &mut dyn Module,
    sites: &[Site],
    wholes: &[Whole],
    tokens: &[TokenParts],
    (embeddings, experts): (&[EmbeddingSite], &[ExpertSite]),
) -> Result<()> {
    struct In<'a>(&'a [Site], &'a [Whole], &'a [TokenParts], &'a [EmbeddingSite], &'a [ExpertSite]);
    impl ModuleMapper for In<'_> {
        fn experts(&mut self, path: &str, _: &[[Tensor; 3]], slot: &mut ExpertSlot) -> models::Result<()> {
            if let Some(site) = self.4.iter().find(|site| site.path == path) {
                slot.change = Some(Box::new(site.layer.shallow_clone()));
            }
            Ok(())
        }

        fn embedding(&mut self, path: &str, embedding: &mut Embedding) -> models::Result<()> {
            if let Some(rows) = token_rows::of_part(path, self.2, self.1)? {
                embedding.token_rows = Some(rows);
            }
            if let Some(site) = self.3.iter().find(|site| site.path == path) {
                let layer = site.layer.shallow_clone();
                embedding.weight = layer.weight.shallow_clone();
                embedding.change = Some(Box::new(layer));
            }
            Ok(())
        }

        fn loss_head(&mut self, path: &str, slot: &mut Box<dyn LossHead>) -> models::Result<()> {
            match token_rows::of_part(path, self.2, self.1)? {
                Some(rows) => slot.set_token_rows(Some(rows)),
                None => Ok(()),
            }
        }

        fn tensor(&mut self, path: &str, tensor: &mut Tensor, _: Role) -> models::Result<()> {
            if let Some(whole) = self.1.iter().find(|whole| whole.paths.iter().any(|known| known == path)) {
                *tensor = whole.live.shallow_clone();
            }
            Ok(())
        }

        fn projection(&mut self, path: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
            if let Some(site) = self.0.iter().find(|site| site.path == path) {
                *slot = Box::new(site.layer.shallow_clone());
            }
            Ok(())
        }
    }
    map_modules(model, &mut In(sites, wholes, tokens, embeddings, experts))
}

/// Restores plain projections and tensors, and the tables' own rows.
pub(super) fn put_back(
    model: &mut dyn Module,
    linears: Vec<(String, Linear)>,
    tensors: Vec<(String, Tensor)>,
) -> Result<()> {
    struct Out(Vec<(String, Linear)>, Vec<(String, Tensor)>);
    impl ModuleMapper for Out {
        fn experts(&mut self, _: &str, _: &[[Tensor; 3]], slot: &mut ExpertSlot) -> models::Result<()> {
            slot.change = None;
            Ok(())
        }

        fn embedding(&mut self, _: &str, embedding: &mut Embedding) -> models::Result<()> {
            embedding.token_rows = None;
            embedding.change = None;
            Ok(())
        }

        fn loss_head(&mut self, _: &str, slot: &mut Box<dyn LossHead>) -> models::Result<()> {
            slot.set_token_rows(None)
        }

        fn tensor(&mut self, path: &str, tensor: &mut Tensor, _: Role) -> models::Result<()> {
            if let Some((_, original)) = self.1.iter().find(|(known, _)| known == path) {
                *tensor = original.shallow_clone();
            }
            Ok(())
        }

        fn projection(&mut self, path: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
            if let Some(at) = self.0.iter().position(|(known, _)| known == path) {
                *slot = Box::new(self.0.swap_remove(at).1);
            }
            Ok(())
        }
    }
    map_modules(model, &mut Out(linears, tensors))
}
