//! Lists a model's projections and tensors by Hugging Face's names, without changing anything.

use std::collections::BTreeSet;

use models::module::{
    LossHead, Mlp, MlpFunction, Module, ModuleMapper, Projection, Role, map_modules, tensors,
};
use models::token_rows::TOKEN_ROWS;
use models::{Embedding, ExpertSlot, ExpertTensor, hugging_face};
use runtime::precision::identity;
use tch::Tensor;

use crate::error::{Error, Result};

/// A projection that can be adapted.
#[derive(Debug)]
pub(crate) struct Found {
    /// The model's name.
    pub(crate) path: String,
    /// Hugging Face's name.
    pub(crate) name: String,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    /// Whether it is the output head.
    pub(crate) head: bool,
    /// Whether its tensors are only a weight and possibly a bias.
    pub(crate) plain: bool,
}

/// An embedding that can be adapted.
#[derive(Debug)]
pub(crate) struct FoundEmbedding {
    /// The model's name.
    pub(crate) path: String,
    /// Hugging Face's name.
    pub(crate) name: String,
    pub(crate) weight: Tensor,
    /// Whether no technique changes what it looks up.
    pub(crate) plain: bool,
}

/// The experts of a mixture.
#[derive(Debug)]
pub(crate) struct FoundExperts {
    /// The model's name.
    pub(crate) path: String,
    /// Hugging Face's name.
    pub(crate) name: String,
    /// Gate, up and down of each.
    pub(crate) matrices: Vec<[Tensor; 3]>,
    pub(crate) in_turns: bool,
    pub(crate) is_streamed: bool,
    /// Whether no technique changes them.
    pub(crate) plain: bool,
}

/// A tensor of the base.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    /// Identifies the tensor: a tied one has several names.
    pub(crate) identity: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Survey {
    pub(crate) projections: Vec<Found>,
    pub(crate) tensors: Vec<Base>,
    /// Embeddings.
    pub(crate) embeddings: Vec<FoundEmbedding>,
    /// Experts of mixtures.
    pub(crate) experts: Vec<FoundExperts>,
    pub(crate) heads: Vec<String>,
    /// MLPs that compute their products themselves.
    recomputed: Vec<String>,
}

impl Survey {
    pub(crate) fn of(model: &mut dyn Module) -> Result<Self> {
        let mut survey = Self::default();
        map_modules(model, &mut survey)?;
        // Llama's and Qwen2's names lack the `model.` that Hugging Face puts before all but the head.
        let has = |start: &str| survey.tensors.iter().any(|base| base.path.starts_with(start));
        if has("embed_tokens.") && has("layers.") {
            survey
                .projections
                .iter_mut()
                .for_each(|found| found.name = hugging_face::tensor_name(&found.path));
            survey
                .embeddings
                .iter_mut()
                .for_each(|found| found.name = hugging_face::tensor_name(&found.path));
            survey.experts.iter_mut().for_each(|found| found.name = hugging_face::tensor_name(&found.path));
            survey.tensors.iter_mut().for_each(|base| base.name = hugging_face::tensor_name(&base.path));
            survey.recomputed.iter_mut().for_each(|path| *path = hugging_face::tensor_name(path));
        }
        let Self { projections, tensors, heads, .. } = &mut survey;
        for found in projections.iter_mut() {
            let inside = |head: &String| found.path == *head || found.path.starts_with(&format!("{head}."));
            found.head = heads.iter().any(inside);
        }
        // The trained tensors of an adapted projection belong to its adapter.
        let adapted: Vec<&Found> = projections.iter().filter(|found| !found.plain).collect();
        let learned = |path: &str| {
            let rest = adapted.iter().find_map(|found| path.strip_prefix(found.path.as_str()));
            rest.is_some_and(|rest| rest.starts_with(".lora_"))
        };
        // Trained rows of tokens belong to the adapters that have them.
        let of_embedding = |path: &str| path.ends_with(TOKEN_ROWS) || path.contains(".lora_embedding_");
        let of_experts = |path: &str| {
            ExpertTensor::ALL.iter().any(|one| path.contains(&format!(".experts.{}.lora_", one.name())))
        };
        tensors.retain(|base| !learned(&base.path) && !of_embedding(&base.path) && !of_experts(&base.path));
        Ok(survey)
    }

    /// Returns every projection's name.
    pub(crate) fn names(&self) -> Vec<String> {
        self.projections.iter().map(|found| found.name.clone()).collect()
    }

    /// Returns the enclosing MLP of a module, if it computes its products itself.
    pub(crate) fn recomputed(&self, module: &str) -> Option<&str> {
        let around =
            |mlp: &&String| module.strip_prefix(mlp.as_str()).is_some_and(|rest| rest.starts_with('.'));
        self.recomputed.iter().find(around).map(String::as_str)
    }

    /// Returns every module's name: the prefixes before the dots in tensor names.
    pub(crate) fn modules(&self) -> BTreeSet<String> {
        let ends = |name: &str| -> Vec<String> {
            name.match_indices('.').map(|(end, _)| name[..end].to_owned()).collect()
        };
        self.tensors.iter().flat_map(|base| ends(&base.name)).collect()
    }
}

impl ModuleMapper for Survey {
    fn tensor(&mut self, path: &str, tensor: &mut Tensor, role: Role) -> models::Result<()> {
        if role == Role::Parameter {
            self.tensors.push(Base {
                path: path.to_owned(),
                name: path.to_owned(),
                tensor: tensor.shallow_clone(),
                identity: identity(tensor)?,
            });
        }
        Ok(())
    }

    fn projection(&mut self, path: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
        let (mut weight, mut bias, mut plain) = (None, None, true);
        for named in tensors(&**slot) {
            match named.name.as_str() {
                "weight" => weight = Some(named.tensor.shallow_clone()),
                "bias" => bias = Some(named.tensor.shallow_clone()),
                _ => plain = false,
            }
        }
        if let Some(weight) = weight {
            let (path, name) = (path.to_owned(), path.to_owned());
            self.projections.push(Found { path, name, weight, bias, head: false, plain });
        }
        Ok(())
    }

    fn mlp(&mut self, path: &str, slot: &mut Box<dyn Mlp>) -> models::Result<()> {
        if slot.function() == MlpFunction::Recomputed {
            self.recomputed.push(path.to_owned());
        }
        Ok(())
    }

    fn embedding(&mut self, path: &str, embedding: &mut Embedding) -> models::Result<()> {
        let (path, name) = (path.to_owned(), path.to_owned());
        let (weight, plain) = (embedding.weight.shallow_clone(), embedding.change.is_none());
        self.embeddings.push(FoundEmbedding { path, name, weight, plain });
        Ok(())
    }

    fn experts(&mut self, path: &str, matrices: &[[Tensor; 3]], slot: &mut ExpertSlot) -> models::Result<()> {
        let clone = |[gate, up, down]: &[Tensor; 3]| [gate, up, down].map(Tensor::shallow_clone);
        self.experts.push(FoundExperts {
            path: path.to_owned(),
            name: path.to_owned(),
            matrices: matrices.iter().map(clone).collect(),
            in_turns: slot.has_gate_and_up_in_turns(),
            is_streamed: slot.is_streamed(),
            plain: slot.change.is_none(),
        });
        Ok(())
    }

    fn loss_head(&mut self, path: &str, _: &mut Box<dyn LossHead>) -> models::Result<()> {
        self.heads.push(path.to_owned());
        Ok(())
    }
}

/// Refuses a model with adapters of another handle.
pub(crate) fn refuse_foreign(survey: &Survey, known: &[&str]) -> Result<()> {
    let projections =
        survey.projections.iter().map(|found| ("projection", &found.path, &found.name, found.plain));
    let embeddings =
        survey.embeddings.iter().map(|found| ("embedding", &found.path, &found.name, found.plain));
    let experts = survey.experts.iter().map(|found| ("expert", &found.path, &found.name, found.plain));
    let foreign = projections
        .chain(embeddings)
        .chain(experts)
        .find(|(_, path, _, plain)| !plain && !known.contains(&path.as_str()));
    match foreign {
        None => Ok(()),
        Some((kind, _, name, _)) => Err(Error::Invalid(format!(
            "`{name}` is no plain {kind}: it has tensors beside its weight and bias, perhaps of adapters that were installed \
             before; add to those with `Adapters::add`, or unload them first"
        ))),
    }
}
