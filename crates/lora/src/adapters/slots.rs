//! Changes of the model's own slots and tensors.

use models::Linear;
use models::module::{Module, ModuleMapper, Projection, Role, map_modules};
use tch::Tensor;

use super::Site;
use super::modules_to_save::Whole;
use crate::error::Result;

/// Installs the adapted projections and the tensors that are trained as a whole.
pub(super) fn put_in(model: &mut dyn Module, sites: &[Site], wholes: &[Whole]) -> Result<()> {
    struct In<'a>(&'a [Site], &'a [Whole]);
    impl ModuleMapper for In<'_> {
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
    map_modules(model, &mut In(sites, wholes))
}

/// Restores plain projections and tensors.
pub(super) fn put_back(
    model: &mut dyn Module,
    linears: Vec<(String, Linear)>,
    tensors: Vec<(String, Tensor)>,
) -> Result<()> {
    struct Out(Vec<(String, Linear)>, Vec<(String, Tensor)>);
    impl ModuleMapper for Out {
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
