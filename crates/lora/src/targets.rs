//! Resolves the modules of a configuration as PEFT does.
//!
//! A list entry matches a module with that name, or whose name ends with a dot and the entry. A string is a regular expression
//! for whole names. Modules that are excluded or saved whole are never adapted. Regular expressions are those of the `fancy-regex`
//! crate, which has Python's look-around and back-references.

use models::{DecoderConfig, ExpertTensor, hugging_face};
use serde_json::{Map, Value};

use crate::adapters::token_rows::{TokenGroup, token_groups};
use crate::config::{Layers, LoraConfig, Names};
use crate::error::{Error, Result, no_target, option, unsupported};
use crate::experts::{self, ExpertShape};
use crate::options::LoraLinearConfig;

/// Hugging Face's name of a decoder's embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens";
/// That of the second one of a Gemma 4, whose rows are no rows of tokens.
pub(crate) const PER_LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer";
/// The value for every projection except the head.
const ALL_LINEAR: &str = "all-linear";
/// PEFT's default targets: of Phi-3 the last, of the other families the others.
const DEFAULT_TARGETS: [&str; 3] = ["q_proj", "v_proj", "qkv_proj"];

/// A configuration with its patterns compiled.
#[derive(Debug)]
pub(crate) struct Targets<'a> {
    config: &'a LoraConfig,
    pub(crate) modules: Names,
    pattern: Option<Pattern>,
    excluded: Option<Pattern>,
    saved: Vec<Pattern>,
    pub(crate) layers: Vec<Pattern>,
}

impl<'a> Targets<'a> {
    pub(crate) fn new(config: &'a LoraConfig) -> Result<Self> {
        let whole = |names: Option<&Names>| match names {
            Some(Names::Pattern(pattern)) if !is_all_linear(pattern) => {
                compile(pattern, &format!("^(?:{pattern})$")).map(Some)
            }
            _ => Ok(None),
        };
        let saved = config.modules_to_save.iter().flatten();
        let layers = match &config.layers_pattern {
            Some(Names::Pattern(pattern)) if !pattern.is_empty() => vec![pattern.clone()],
            Some(Names::List(patterns)) if !patterns.is_empty() => patterns.clone(),
            _ => Vec::new(),
        };
        let layers = if layers.is_empty() {
            vec![compile("layers", r"^.*?\.[^.]*\.(?P<index>\d+)\.")?]
        } else {
            let one =
                |pattern: &String| compile(pattern, &format!(r"^(?:|.*?\.)(?:{pattern})\.(?P<index>\d+)\."));
            layers.iter().map(one).collect::<Result<_>>()?
        };
        let modules = match &config.target_modules {
            Some(modules) => modules.clone(),
            None if config.adapts_parameters() => Names::List(Vec::new()),
            None => DEFAULT_TARGETS.into(),
        };
        if matches!(modules, Names::Pattern(_)) && config.layers_to_transform.is_some() {
            return Err(unsupported(
                "layers_to_transform",
                "set beside a pattern",
                "name the layers in the pattern of `target_modules`, or give a list of names",
            ));
        }
        Ok(Self {
            pattern: whole(Some(&modules))?,
            excluded: whole(config.exclude_modules.as_ref())?,
            saved: saved
                .map(|name| compile(name, &format!(r"^(?:|.*\.)(?:{name})(?:$|\..*)")))
                .collect::<Result<_>>()?,
            config,
            modules,
            layers,
        })
    }

    /// Whether to adapt the module of this name; `head` marks the output head.
    pub(crate) fn wants(&self, name: &str, head: bool) -> bool {
        let excluded = match (&self.excluded, &self.config.exclude_modules) {
            (Some(pattern), _) => pattern.is_match(name),
            (None, Some(Names::List(names))) => in_list(names, name),
            _ => false,
        };
        if excluded || self.saved.iter().any(|saved| saved.is_match(name)) {
            return false;
        }
        match (&self.pattern, &self.modules) {
            (Some(pattern), _) => pattern.is_match(name),
            (None, Names::Pattern(_)) => !head,
            (None, Names::List(names)) if names.iter().any(|known| known == name) => true,
            (None, Names::List(names)) => in_list(names, name) && self.in_layers(name),
        }
    }

    /// Whether to adapt a tensor of all experts of a layer, by its whole name.
    pub(crate) fn wants_parameter(&self, name: &str) -> bool {
        self.config.target_parameters.as_ref().is_some_and(|names| in_list(names, name))
    }

    /// Whether it means every projection, so that it never names anything else.
    pub(crate) fn means_projections_only(&self) -> bool {
        matches!(&self.modules, Names::Pattern(pattern) if is_all_linear(pattern))
    }

    /// Returns name and shape of the embeddings of such a model that are adapted.
    pub(crate) fn wanted_embeddings(&self, model: &DecoderConfig) -> Vec<(String, [i64; 2])> {
        let second = model.gemma4.filter(|gemma4| gemma4.per_layer_input > 0).map(|gemma4| {
            let width = model.num_hidden_layers * gemma4.per_layer_input;
            (PER_LAYER_EMBEDDING.to_owned(), [gemma4.per_layer_vocabulary, width])
        });
        let first = (EMBEDDING.to_owned(), [model.vocab_size, model.hidden_size]);
        let all = std::iter::once(first).chain(second);
        all.filter(|(name, _)| !self.means_projections_only() && self.wants(name, false)).collect()
    }

    /// Describes the targets for an error.
    pub(crate) fn described(&self) -> String {
        let written = match &self.modules {
            Names::Pattern(pattern) => format!("`{pattern}`"),
            Names::List(names) => format!("{names:?}"),
        };
        let layers = match &self.config.layers_to_transform {
            Some(Layers::One(layer)) => format!(" in layer {layer}"),
            Some(Layers::Several(layers)) if !layers.is_empty() => format!(" in layers {layers:?}"),
            _ => String::new(),
        };
        match &self.config.target_parameters {
            Some(parameters) if self.config.adapts_parameters() => {
                format!("`target_modules` {written}{layers} with `target_parameters` {parameters:?}")
            }
            _ => format!("`target_modules` {written}{layers}"),
        }
    }

    fn in_layers(&self, name: &str) -> bool {
        let wanted: &[i64] = match &self.config.layers_to_transform {
            None => return true,
            Some(Layers::One(layer)) => std::slice::from_ref(layer),
            Some(Layers::Several(layers)) if layers.is_empty() => return true,
            Some(Layers::Several(layers)) => layers,
        };
        let index = self.layers.iter().find_map(|pattern| pattern.index_in(name));
        index.is_some_and(|index| wanted.contains(&index))
    }
}

/// Returns the value of the first pattern that matches the end of a name.
fn pattern_value<'a>(patterns: &'a Map<String, Value>, name: &str) -> Result<Option<&'a Value>> {
    for (pattern, value) in patterns {
        if compile(pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))?.is_match(name) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

pub(crate) fn is_all_linear(pattern: &str) -> bool {
    pattern.eq_ignore_ascii_case(ALL_LINEAR)
}

pub(crate) fn in_list(names: &[String], name: &str) -> bool {
    let ends = |known: &String| name.strip_suffix(known.as_str()).is_some_and(|rest| rest.ends_with('.'));
    names.iter().any(|known| known == name || ends(known))
}

/// A regular expression for names of modules.
#[derive(Debug)]
pub(crate) struct Pattern(fancy_regex::Regex);

impl Pattern {
    /// Whether it matches. One that gives up, after a million steps back on one name, does not.
    pub(crate) fn is_match(&self, name: &str) -> bool {
        self.0.is_match(name).unwrap_or(false)
    }

    /// The number of its group `index` in a name.
    fn index_in(&self, name: &str) -> Option<i64> {
        self.0.captures(name).ok().flatten()?.name("index")?.as_str().parse().ok()
    }
}

pub(crate) fn compile(pattern: &str, whole: &str) -> Result<Pattern> {
    fancy_regex::Regex::new(whole).map(Pattern).map_err(|cause| {
        let cause = cause.to_string();
        let last = cause.lines().last().unwrap_or_default().trim_start_matches("error: ");
        // Positions would be those of the whole expression.
        let reason =
            match last.strip_prefix("Parsing error at position ").and_then(|last| last.split_once(": ")) {
                Some((_, reason)) => reason.to_lowercase(),
                None => last.to_owned(),
            };
        Error::Invalid(format!("the pattern `{pattern}`: {reason}"))
    })
}

impl LoraConfig {
    /// Returns the options of one projection, by its whole name.
    ///
    /// # Errors
    /// An invalid regular expression, or a pattern without a numeric value; an option outside its range.
    pub fn options(&self, name: &str) -> Result<LoraLinearConfig> {
        let r = pattern_value(&self.rank_pattern, name)?;
        let alpha = pattern_value(&self.alpha_pattern, name)?;
        let number = |field: &'static str, value: &Value| {
            value.as_f64().ok_or_else(|| option(field, value, "a number for each pattern"))
        };
        let rank = match r {
            Some(value) => value
                .as_i64()
                .ok_or_else(|| option("rank_pattern", value, "a whole number for each pattern"))?,
            None => self.r,
        };
        let options = LoraLinearConfig {
            r: rank,
            alpha: alpha.map_or(Ok(self.lora_alpha), |value| number("alpha_pattern", value))?,
            dropout: self.lora_dropout,
            rslora: self.use_rslora,
            dora: self.use_dora,
            init: self.init()?,
            seed: 0,
        };
        options.check_as(if r.is_some() { "rank_pattern" } else { "r" })?;
        Ok(options)
    }

    /// Returns whether tensors of experts are to be adapted.
    pub(crate) fn adapts_parameters(&self) -> bool {
        self.target_parameters.as_ref().is_some_and(|names| !names.is_empty())
    }

    /// Returns the number of trainable parameters of this configuration for a model, without creating either. Modules that are
    /// saved whole and biases are not counted.
    ///
    /// # Errors
    /// Errors of [`LoraConfig::options`]; targets that match nothing.
    pub fn trainable_parameters(&self, model: &DecoderConfig) -> Result<u64> {
        self.check()?;
        let targets = Targets::new(self)?;
        let projections = projections(model);
        let mut count = 0;
        let mut matched = false;
        for (name, [inner, out]) in &projections {
            if targets.wants(name, name == "lm_head") {
                matched = true;
                let options = self.options(name)?;
                count += options.r * (inner + out) + if options.dora { *out } else { 0 };
            }
        }
        for (name, [rows, width]) in targets.wanted_embeddings(model) {
            matched = true;
            count += self.options(&name)?.r * (rows + width);
        }
        for (name, shape, of) in
            expert_tensors(model).into_iter().filter(|(name, ..)| targets.wants_parameter(name))
        {
            matched = true;
            let options = self.options(&name)?;
            experts::refuse(&options)?;
            count +=
                shape.of_adapter(of, options.r).iter().map(|[rows, columns]| rows * columns).sum::<i64>();
        }
        if matched {
            count += self.token_rows(model)? * model.hidden_size;
            return Ok(count.cast_unsigned());
        }
        let names: Vec<String> = projections.into_iter().map(|(name, _)| name).collect();
        Err(no_target(&targets.described(), &names))
    }

    /// Returns the number of trained rows of tokens in a model: those of a tied head are the embedding's.
    ///
    /// # Errors
    /// A name that is neither the embedding's nor the head's.
    pub fn token_rows(&self, model: &DecoderConfig) -> Result<i64> {
        self.rows(model, &|_| true)
    }

    /// Returns the number of rows that the embedding has in place of its own.
    ///
    /// # Errors
    /// As [`LoraConfig::token_rows`].
    pub fn rows_in_embedding(&self, model: &DecoderConfig) -> Result<i64> {
        self.rows(model, &|group| group.in_embedding)
    }

    /// Returns the number of rows that the head has in place of its own.
    ///
    /// # Errors
    /// As [`LoraConfig::token_rows`].
    pub fn rows_in_head(&self, model: &DecoderConfig) -> Result<i64> {
        self.rows(model, &|group| group.in_head)
    }

    fn rows(&self, model: &DecoderConfig, is_wanted: &dyn Fn(&TokenGroup<'_>) -> bool) -> Result<i64> {
        let groups = token_groups(self, EMBEDDING, "lm_head", model.tie_word_embeddings)?;
        let wanted = groups.iter().filter(|group| is_wanted(group));
        Ok(wanted.map(|group| group.tokens.len() as i64).sum())
    }

    /// Returns whether a tensor of all experts of a layer is adapted, by its whole name (`model.layers.0.mlp.experts.down_proj`).
    ///
    /// # Errors
    /// An invalid regular expression.
    pub fn adapts_parameter(&self, name: &str) -> Result<bool> {
        Ok(Targets::new(self)?.wants_parameter(name))
    }

    /// Returns whether the projection of this whole name (`model.layers.0.mlp.up_proj`, `lm_head`) is adapted, or saved whole.
    ///
    /// # Errors
    /// An invalid regular expression.
    pub fn adapts(&self, name: &str) -> Result<bool> {
        let targets = Targets::new(self)?;
        if targets.means_projections_only() && name.ends_with("embed_tokens") {
            return Ok(targets.saved.iter().any(|saved| saved.is_match(name)));
        }
        Ok(targets.saved.iter().any(|saved| saved.is_match(name)) || targets.wants(name, name == "lm_head"))
    }
}

/// Name and `[in, out]` of every projection of such a model.
pub(crate) fn projections(model: &DecoderConfig) -> Vec<(String, [i64; 2])> {
    const HEAD: &str = "lm_head";
    let blocks = model.projections().into_iter().filter(|(name, _)| name != HEAD);
    let blocks = blocks.map(|(name, widths)| (hugging_face::tensor_name(&name), widths));
    blocks.chain([(HEAD.to_owned(), [model.hidden_size, model.vocab_size])]).collect()
}

/// Name, shape and kind of every tensor of all experts of a layer of such a model.
pub(crate) fn expert_tensors(model: &DecoderConfig) -> Vec<(String, ExpertShape, ExpertTensor)> {
    let layers = usize::try_from(model.num_hidden_layers).unwrap_or(0);
    let of_layer = |layer| {
        let mixture = model.layer_mixture(layer)?;
        let shape = ExpertShape {
            experts: mixture.experts,
            hidden: model.hidden_size,
            inner: mixture.intermediate_size,
        };
        Some(
            ExpertTensor::ALL
                .map(|of| (format!("model.layers.{layer}.mlp.experts.{}", of.name()), shape, of)),
        )
    };
    (0..layers).filter_map(of_layer).flatten().collect()
}
