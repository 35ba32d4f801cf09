//! Plans a configuration for a model, and refuses invalid ones before anything is changed.

use std::collections::BTreeSet;

use kernels::quantized::matrix_shape;
use models::ExpertTensor;
use tch::Tensor;

use super::survey::{Found, FoundExperts, Survey};
use super::token_rows::{self, TokenParts};
use crate::config::{BiasTraining, LoraConfig};
use crate::embedding;
use crate::error::{Error, Result, listed, no_target, suggestion, unsupported};
use crate::experts;
use crate::options::LoraLinearConfig;
use crate::targets::{Targets, in_list};

/// A projection and its new adapter.
#[derive(Debug)]
pub(crate) struct PlannedSite {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) options: LoraLinearConfig,
}

/// The experts of a layer and their new adapters.
#[derive(Debug)]
pub(crate) struct PlannedExperts {
    pub(crate) path: String,
    pub(crate) name: String,
    pub(crate) matrices: Vec<[Tensor; 3]>,
    pub(crate) in_turns: bool,
    pub(crate) is_streamed: bool,
    /// Each adapted tensor of all, in the order of PEFT's wrappers.
    pub(crate) adapted: Vec<(ExpertTensor, LoraLinearConfig)>,
}

impl PlannedExperts {
    /// Returns what is adapted.
    pub(crate) fn tensors(&self) -> Vec<ExpertTensor> {
        self.adapted.iter().map(|(of, _)| *of).collect()
    }
}

/// A tensor of the base that is trained as a whole.
#[derive(Debug)]
pub(crate) struct PlannedWhole {
    /// The model's names; several if it is tied and trained as one.
    pub(crate) paths: Vec<String>,
    /// Hugging Face's names, in the same order.
    pub(crate) names: Vec<String>,
    /// Names in files, without PEFT's prefix; the first is written.
    pub(crate) keys: Vec<String>,
    pub(crate) tensor: Tensor,
    /// Whether frozen tensors share it, so that it needs its own handle.
    pub(crate) split: bool,
}

#[derive(Debug, Default)]
pub(crate) struct AdapterPlan {
    pub(crate) sites: Vec<PlannedSite>,
    /// Adapted embeddings; their biases are absent.
    pub(crate) embeddings: Vec<PlannedSite>,
    pub(crate) experts: Vec<PlannedExperts>,
    pub(crate) wholes: Vec<PlannedWhole>,
    /// Rows of tokens, whose tensors are among `wholes`.
    pub(crate) token_parts: Vec<TokenParts>,
}

impl AdapterPlan {
    pub(crate) fn new(survey: &Survey, config: &LoraConfig) -> Result<Self> {
        config.check()?;
        let targets = Targets::new(config)?;
        let mut sites = Vec::new();
        for Found { path, name, weight, bias, head, .. } in &survey.projections {
            if targets.wants(name, *head) {
                let clone = Tensor::shallow_clone;
                sites.push(PlannedSite {
                    path: path.clone(),
                    name: name.clone(),
                    weight: clone(weight),
                    bias: bias.as_ref().map(clone),
                    options: config.options(name)?,
                });
            }
        }
        let mut embeddings = Vec::new();
        for found in &survey.embeddings {
            if !targets.means_projections_only() && targets.wants(&found.name, false) {
                let options = config.options(&found.name)?;
                embedding::refuse(&options)?;
                embeddings.push(PlannedSite {
                    path: found.path.clone(),
                    name: found.name.clone(),
                    weight: found.weight.shallow_clone(),
                    bias: None,
                    options,
                });
            }
        }
        let experts = experts(survey, config, &targets)?;
        let names = survey.names();
        for name in survey.modules() {
            if let Some(mlp) = survey.recomputed(&name).filter(|_| targets.wants(&name, false)) {
                let mut others: Vec<&str> = names.iter().filter_map(|name| name.rsplit('.').next()).collect();
                others.sort_unstable();
                others.dedup();
                return Err(Error::Unsupported(format!(
                    "the target `{name}` is inside the MLP `{mlp}`, which computes its products itself to recompute them in backward, so \
                     it has no projection to adapt; name other target modules, such as {}, or leave the MLP as it is",
                    others.join(", ")
                )));
            }
        }
        if !targets.means_projections_only() {
            let known: BTreeSet<&String> = names.iter().collect();
            let modules = survey.modules();
            // PEFT finds no module for an expert that the router chooses, whose matrices are in one tensor of all: a name that also is
            // the shared expert's means that one alone.
            let is_shared = |name: &str| {
                let (layer, expert) = name.split_once(".mlp.experts.").unwrap_or_default();
                let projection = expert.rsplit('.').next().unwrap_or_default();
                known.contains(&format!("{layer}.mlp.shared_expert.{projection}"))
            };
            let is_embedding = |name: &String| survey.embeddings.iter().any(|found| found.name == *name);
            let is_other = |name: &String| !known.contains(name) && !is_shared(name) && !is_embedding(name);
            if let Some(name) = modules.iter().find(|name| is_other(name) && targets.wants(name, false)) {
                if name.contains(".mlp.experts.") {
                    return Err(Error::Invalid(format!(
                        "the target `{name}` is a matrix of an expert that a router chooses, which PEFT adapts in the tensors of all experts \
                         of a layer; name those by `target_parameters`: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`"
                    )));
                }
                return Err(Error::Invalid(format!(
                    "the target `{name}` is not a linear projection of this model, so it cannot be adapted; the projections are {}. \
                     Train it whole by `modules_to_save`, or leave it out by `exclude_modules`",
                    listed(&names)
                )));
            }
        }
        if sites.is_empty() && embeddings.is_empty() && experts.is_empty() {
            return Err(no_target(&targets.described(), &names));
        }
        refuse_adapted_tying(survey, config, sites.iter().chain(&embeddings))?;
        let mut wholes = wholes(survey, config, &sites)?;
        let mut token_parts = Vec::new();
        for planned in token_rows::planned(survey, config)? {
            token_rows::refuse_other_changes(survey, &planned, sites.iter().chain(&embeddings), &wholes)?;
            wholes.push(planned.whole);
            token_parts.push(planned.parts);
        }
        Ok(Self { sites, embeddings, experts, wholes, token_parts })
    }

    /// Returns every tensor of the adapter in a file, without PEFT's prefix, with its shape. A tied tensor has several names,
    /// and a file has at least one of them.
    pub(crate) fn expected(&self) -> Vec<(Vec<String>, Vec<i64>)> {
        let mut expected = Vec::new();
        for PlannedSite { name, weight, options, .. } in &self.sites {
            let [out, inner] = matrix_shape(weight).unwrap_or_default();
            expected.push((vec![format!("{name}.lora_A.weight")], vec![options.r, inner]));
            expected.push((vec![format!("{name}.lora_B.weight")], vec![out, options.r]));
            if options.dora {
                expected.push((vec![format!("{name}.lora_magnitude_vector")], vec![out]));
            }
        }
        for PlannedSite { name, weight, options, .. } in &self.embeddings {
            let [tokens, width] = matrix_shape(weight).unwrap_or_default();
            expected.push((vec![format!("{name}.lora_embedding_A")], vec![options.r, tokens]));
            expected.push((vec![format!("{name}.lora_embedding_B")], vec![width, options.r]));
        }
        for planned in &self.experts {
            let (shape, tensors) = (experts::shape_of(&planned.matrices), planned.tensors());
            for (of, options) in &planned.adapted {
                let key = experts::key(&planned.name, *of, &tensors);
                for (part, shape) in ["lora_A", "lora_B"].into_iter().zip(shape.of_adapter(*of, options.r)) {
                    expected.push((vec![format!("{key}.{part}.weight")], shape.to_vec()));
                }
            }
        }
        // PEFT writes the rows of a tied head's tokens too if the vocabulary grew.
        let names = |whole: &PlannedWhole| match token_rows::is_rows(whole) {
            true => whole.names.clone(),
            false => whole.keys.clone(),
        };
        expected.extend(self.wholes.iter().map(|whole| (names(whole), whole.tensor.size())));
        expected
    }
}

/// Plans the adapters of experts.
fn experts(survey: &Survey, config: &LoraConfig, targets: &Targets<'_>) -> Result<Vec<PlannedExperts>> {
    let mut planned = Vec::new();
    let mut names = Vec::new();
    for FoundExperts { path, name, matrices, in_turns, is_streamed, .. } in &survey.experts {
        let mut adapted = Vec::new();
        for of in ExpertTensor::ALL {
            let parameter = format!("{name}.{}", of.name());
            if targets.wants_parameter(&parameter) {
                let options = config.options(&parameter)?;
                experts::refuse(&options)?;
                adapted.push((of, options));
            }
            names.push(parameter);
        }
        if !adapted.is_empty() {
            let clone = |[gate, up, down]: &[Tensor; 3]| [gate, up, down].map(Tensor::shallow_clone);
            planned.push(PlannedExperts {
                path: path.clone(),
                name: name.clone(),
                matrices: matrices.iter().map(clone).collect(),
                in_turns: *in_turns,
                is_streamed: *is_streamed,
                adapted,
            });
        }
    }
    for entry in config.target_parameters.iter().flatten() {
        if !names.iter().any(|name| in_list(std::slice::from_ref(entry), name)) {
            return Err(Error::Invalid(format!(
                "`target_parameters`: `{entry}` is none of the tensors of this model's experts; they are {}. Name a projection in \
                 `target_modules`",
                listed(&names)
            )));
        }
    }
    Ok(planned)
}

/// Refuses to tie an adapted projection: PEFT then also adapts the embedding, with the same A and B.
fn refuse_adapted_tying<'a>(
    survey: &Survey,
    config: &LoraConfig,
    mut sites: impl Iterator<Item = &'a PlannedSite>,
) -> Result<()> {
    let is_tied = |site: &PlannedSite| {
        let weight = format!("{}.weight", site.name);
        let own = survey.tensors.iter().find(|base| base.name == weight);
        own.is_some_and(|own| {
            survey.tensors.iter().any(|base| base.identity == own.identity && base.name != own.name)
        })
    };
    match sites.find(|site| config.ensure_weight_tying && is_tied(site)) {
        Some(site) => Err(tied_adapter(&site.name)),
        None => Ok(()),
    }
}

/// The error of a tied projection with an adapter.
pub(crate) fn tied_adapter(name: &str) -> Error {
    unsupported(
        "ensure_weight_tying",
        format!("true with an adapter on `{name}`, where the head and the embedding are tied"),
        "leave `ensure_weight_tying` out (a merged head gets its own weights), or put `lm_head` into `modules_to_save` instead",
    )
}

fn wholes(survey: &Survey, config: &LoraConfig, sites: &[PlannedSite]) -> Result<Vec<PlannedWhole>> {
    let modules = survey.modules();
    for name in config.modules_to_save.iter().flatten() {
        if !modules.iter().any(|module| module.ends_with(name.as_str())) {
            let names: Vec<String> = modules.into_iter().collect();
            return Err(Error::Invalid(format!(
                "`modules_to_save`: the model has no module that ends with `{name}`; it has {}{}",
                listed(&names),
                suggestion(name, &names)
            )));
        }
    }
    let adapted = |name: &str| {
        let module = name.strip_suffix(".bias");
        module.is_some_and(|module| sites.iter().any(|site| site.name == module))
    };
    let saved = |name: &str| {
        let mut modules = name.match_indices('.').map(|(end, _)| &name[..end]);
        let wanted = |module: &str| {
            config.modules_to_save.iter().flatten().any(|saved| module.ends_with(saved.as_str()))
        };
        modules.any(wanted)
    };
    let wanted = |name: &str| {
        saved(name)
            || match config.bias {
                BiasTraining::None => false,
                BiasTraining::All => name.ends_with(".bias"),
                BiasTraining::LoraOnly => adapted(name),
            }
    };
    let key = |name: &str| match name.strip_suffix(".bias") {
        Some(module) if adapted(name) => format!("{module}.base_layer.bias"),
        _ => name.to_owned(),
    };
    let mut planned: Vec<(usize, PlannedWhole)> = Vec::new();
    for base in survey.tensors.iter().filter(|base| wanted(&base.name)) {
        let group = survey.tensors.iter().filter(|other| other.identity == base.identity);
        let tied = group.clone().count() > 1;
        let group: Vec<_> = if tied && config.ensure_weight_tying {
            if planned.iter().any(|(identity, _)| *identity == base.identity) {
                continue;
            }
            group.collect()
        } else {
            vec![base]
        };
        let names: Vec<String> = group.iter().map(|base| base.name.clone()).collect();
        planned.push((
            base.identity,
            PlannedWhole {
                paths: group.iter().map(|base| base.path.clone()).collect(),
                keys: names.iter().map(|name| key(name)).collect(),
                names,
                tensor: base.tensor.shallow_clone(),
                split: tied && !config.ensure_weight_tying,
            },
        ));
    }
    Ok(planned.into_iter().map(|(_, whole)| whole).collect())
}
