//! Entries of a configuration that match nothing in a model.
//!
//! PEFT accepts them, and a misspelt one trains less than was meant. Files are read as PEFT reads them; who configures a training calls
//! [`LoraConfig::check_matches`].

use models::DecoderConfig;
use serde_json::{Map, Value};

use crate::config::{Layers, LoraConfig, Names};
use crate::error::{Result, no_match, no_target, option};
use crate::targets::{Targets, compile, expert_tensors, in_list, is_all_linear, projections};

const EXPERTS: &str = "the tensors of the model's experts";
const PROJECTIONS: &str = "the model's projections";
const ADAPTED: &str = "the adapted projections";

impl LoraConfig {
    /// Refuses a target, an excluded module, a layer, a pattern or a rank that a model has no use of. The default targets
    /// (`target_modules` of `None`) are never refused.
    ///
    /// # Errors
    /// An entry that matches nothing, with the nearest name; nothing that is adapted; a rank beyond both widths of
    /// a projection, where it adds nothing but memory; as [`LoraConfig::options`].
    pub fn check_matches(&self, model: &DecoderConfig) -> Result<()> {
        self.check()?;
        self.check_layers_pattern()?;
        let mut all = projections(model);
        let targets = Targets::new(self)?;
        all.extend(targets.wanted_embeddings(model));
        let names: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
        let of_experts = expert_tensors(model);
        let parameters: Vec<String> = of_experts.iter().map(|(name, ..)| name.clone()).collect();
        for entry in self.target_parameters.iter().flatten() {
            let one = std::slice::from_ref(entry);
            let is_met = parameters.iter().any(|name| in_list(one, name));
            require(is_met, ("target_parameters", entry), EXPERTS, &parameters)?;
        }
        let mut adapted: Vec<String> =
            names.iter().filter(|name| targets.wants(name, *name == "lm_head")).cloned().collect();
        for (name, shape, of) in of_experts.into_iter().filter(|(name, ..)| targets.wants_parameter(name)) {
            all.push((name.clone(), shape.widths(of)));
            adapted.push(name);
        }
        if adapted.is_empty() {
            return Err(no_target(&targets.described(), &names));
        }
        let lists = [("target_modules", &self.target_modules), ("exclude_modules", &self.exclude_modules)];
        for (field, entries) in lists {
            match entries {
                Some(Names::List(entries)) => entries.iter().try_for_each(|entry| {
                    let one = std::slice::from_ref(entry);
                    require(names.iter().any(|name| in_list(one, name)), (field, entry), PROJECTIONS, &names)
                })?,
                Some(Names::Pattern(pattern)) if field == "exclude_modules" && !is_all_linear(pattern) => {
                    let excluded = compile(pattern, &format!("^(?:{pattern})$"))?;
                    let is_met = names.iter().any(|name| excluded.is_match(name));
                    require(is_met, (field, pattern), PROJECTIONS, &names)?;
                }
                _ => {}
            }
        }
        self.check_layers(model.num_hidden_layers)?;
        for pattern in &targets.layers {
            let is_met = names.iter().any(|name| pattern.is_match(name));
            require(is_met, ("layers_pattern", &described(&self.layers_pattern)), PROJECTIONS, &names)?;
        }
        for (field, patterns) in
            [("rank_pattern", &self.rank_pattern), ("alpha_pattern", &self.alpha_pattern)]
        {
            check_patterns(field, patterns, &adapted)?;
        }
        for (name, [inner, out]) in all.iter().filter(|(name, _)| adapted.contains(name)) {
            let r = self.options(name)?.r;
            if r > *inner.max(out) {
                let field = if r == self.r { "r" } else { "rank_pattern" };
                let expected =
                    "a rank within the widths of what it adapts, beyond which it only takes memory";
                let value = format!("{r}, and `{name}` is {inner} by {out}");
                return Err(option(field, value, expected));
            }
        }
        Ok(())
    }

    /// Refuses a pattern of layers that is not read, as PEFT does.
    fn check_layers_pattern(&self) -> Result<()> {
        let is_set = match &self.layers_pattern {
            None => false,
            Some(Names::Pattern(pattern)) => !pattern.is_empty(),
            Some(Names::List(patterns)) => !patterns.is_empty(),
        };
        let has_layers = match &self.layers_to_transform {
            None => false,
            Some(Layers::One(_)) => true,
            Some(Layers::Several(layers)) => !layers.is_empty(),
        };
        match is_set && !has_layers {
            false => Ok(()),
            true => Err(option(
                "layers_pattern",
                format!(
                    "{} without `layers_to_transform`, which it belongs to",
                    described(&self.layers_pattern)
                ),
                "both or neither: the pattern is the name before the numbers of those layers",
            )),
        }
    }

    /// Refuses layers that the model does not have.
    fn check_layers(&self, count: i64) -> Result<()> {
        let wanted: &[i64] = match &self.layers_to_transform {
            None => &[],
            Some(Layers::One(layer)) => std::slice::from_ref(layer),
            Some(Layers::Several(layers)) => layers,
        };
        match wanted.iter().find(|layer| !(0..count).contains(*layer)) {
            None => Ok(()),
            Some(layer) => {
                let layers: Vec<String> = (0..count).map(|layer| layer.to_string()).collect();
                let (field, among) = ("layers_to_transform", "the model's layers");
                Err(no_match(field, &layer.to_string(), among, None, &layers))
            }
        }
    }
}

fn check_patterns(field: &'static str, patterns: &Map<String, Value>, adapted: &[String]) -> Result<()> {
    patterns.keys().try_for_each(|pattern| {
        let end = compile(pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))?;
        let is_met = adapted.iter().any(|name| end.is_match(name));
        require(is_met, (field, pattern), ADAPTED, adapted)
    })
}

/// Refuses an entry that is not met.
fn require(
    is_met: bool,
    (field, entry): (&'static str, &str),
    among: &'static str,
    names: &[String],
) -> Result<()> {
    if is_met {
        return Ok(());
    }
    let ends = names.iter().filter_map(|name| name.rsplit('.').next());
    let near = nearest(entry, ends.chain(names.iter().map(String::as_str)));
    Err(no_match(field, entry, among, near, names))
}

fn described(names: &Option<Names>) -> String {
    match names {
        None => String::new(),
        Some(Names::Pattern(pattern)) => pattern.clone(),
        Some(Names::List(names)) => names.join(", "),
    }
}

/// Returns the name that a typing mistake or two turn into `unknown`.
pub(crate) fn nearest<'a>(unknown: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (unknown.chars().count() / 3).clamp(1, 3);
    let near = names.map(|name| (strsim::damerau_levenshtein(unknown, name), name));
    near.filter(|(distance, name)| *distance <= allowed && *distance < name.chars().count())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}
