//! Rows of the embedding and of the head that are trained alone: PEFT's `trainable_token_indices`.
//!
//! [`models::token_rows`] computes with them. The rows of an adapter are a tensor that is trained as a whole
//! ([`Whole`]): they are switched, disabled and saved as such. This module finds the parts that they belong to, and merges them.

use models::token_rows::{TOKEN_ROWS, TokenRows, rows_of};
use tch::{Device, Kind, Tensor};

use super::modules_to_save::Whole;
use super::plan::{PlannedSite, PlannedWhole};
use super::survey::Survey;
use crate::config::{LoraConfig, TokenIndices};
use crate::error::{Error, Result, unsupported};
use crate::targets::PER_LAYER_EMBEDDING;
use kernels::quantized::{is_quantized, matrix_shape};

const FIELD: &str = "trainable_token_indices";

/// Tokens of the embedding, of the head, or of both if they are tied.
#[derive(Debug)]
pub(crate) struct TokenGroup<'a> {
    pub(crate) in_embedding: bool,
    pub(crate) in_head: bool,
    pub(crate) tokens: &'a [i64],
}

/// Parts of a model with trained rows of tokens.
#[derive(Debug)]
pub(crate) struct TokenParts {
    /// The paths of the embedding and of the head, or of one of them.
    paths: Vec<String>,
    /// The names of their tables' weights, by Hugging Face.
    names: Vec<String>,
    tokens: Vec<i64>,
    /// Their table, `[vocabulary, width]`.
    table: Tensor,
}

impl PartialEq for TokenParts {
    fn eq(&self, other: &Self) -> bool {
        self.paths == other.paths && self.tokens == other.tokens
    }
}

impl TokenParts {
    /// Returns the table by the name of each weight.
    pub(crate) fn originals(&self) -> impl Iterator<Item = (String, Tensor)> {
        self.names.iter().map(|name| (name.clone(), self.table.shallow_clone()))
    }

    /// The names of the rows in the model.
    fn row_paths(&self) -> Vec<String> {
        self.paths.iter().map(|path| format!("{path}.{TOKEN_ROWS}")).collect()
    }
}

/// Parts and their rows.
pub(crate) struct PlannedTokens {
    pub(crate) parts: TokenParts,
    pub(crate) whole: PlannedWhole,
}

/// Whether a tensor that is trained as a whole is rows of tokens.
pub(crate) fn is_rows(whole: &PlannedWhole) -> bool {
    whole.keys.first().is_some_and(|key| key.ends_with(TOKEN_ROWS))
}

/// PEFT's name of a whole table within its part, which it writes beside the rows if the vocabulary grew.
const TABLE: &str = ".token_adapter.base_layer.weight";

/// Whether a tensor of an adapter's file, by its name, is a copy of a table with trained rows; `None` for another name. The rows of a
/// vocabulary before its first trained token have to be the base's; those behind it began with values of their own.
///
/// # Errors
/// Errors of libtorch.
pub(crate) fn is_table(name: &str, values: &Tensor, parts: &[TokenParts]) -> Result<Option<bool>> {
    let Some(module) = name.strip_suffix(TABLE) else { return Ok(None) };
    let weight = format!("{module}.weight");
    let Some(parts) = parts.iter().find(|parts| parts.names.contains(&weight)) else { return Ok(None) };
    let first = parts.tokens.iter().copied().min().unwrap_or(0);
    if is_quantized(&parts.table) {
        return Ok(Some(values.size().first() == parts.table.size().first()));
    }
    if values.size() != parts.table.size() {
        return Ok(Some(false));
    }
    let table = parts.table.f_detach()?.f_to_device(Device::Cpu)?;
    let [table, read] = [&table, values].map(|table| table.f_narrow(0, 0, first));
    let (table, read) = (table?, read?);
    Ok(Some(table.f_equal(&read.f_to_kind(table.kind())?)?))
}

/// Returns the tokens of the embedding and of the head, by the names of these two.
///
/// # Errors
/// A name that is the end of neither; a part that two names lead to.
pub(crate) fn token_groups<'a>(
    config: &'a LoraConfig,
    embedding: &str,
    head: &str,
    is_tied: bool,
) -> Result<Vec<TokenGroup<'a>>> {
    let (mut in_embedding, mut in_head): (Option<&[i64]>, Option<&[i64]>) = (None, None);
    match &config.trainable_token_indices {
        None => {}
        Some(TokenIndices::Embedding(tokens)) => in_embedding = Some(tokens),
        Some(TokenIndices::ByModule(modules)) => {
            for (name, tokens) in modules {
                let place = match name {
                    _ if embedding.ends_with(name.as_str()) => &mut in_embedding,
                    _ if head.ends_with(name.as_str()) => &mut in_head,
                    _ => {
                        return Err(Error::Invalid(format!(
                            "`{FIELD}`: `{name}` is neither the embedding `{embedding}` nor the head `{head}`; name one of them"
                        )));
                    }
                };
                if place.replace(tokens).is_some() {
                    return Err(Error::Invalid(format!("`{FIELD}`: `{name}` is named twice; name it once")));
                }
            }
        }
    }
    // An empty list trains nothing, as in PEFT.
    let [in_embedding, in_head] =
        [in_embedding, in_head].map(|tokens| tokens.filter(|tokens| !tokens.is_empty()));
    let group = |in_embedding, in_head, tokens| TokenGroup { in_embedding, in_head, tokens };
    Ok(match (in_embedding, in_head) {
        (Some(tokens), None) => vec![group(true, is_tied, tokens)],
        (Some(tokens), Some(others)) if is_tied && tokens == others => vec![group(true, true, tokens)],
        (of_embedding, of_head) => {
            let first = of_embedding.map(|tokens| group(true, false, tokens));
            first.into_iter().chain(of_head.map(|tokens| group(false, true, tokens))).collect()
        }
    })
}

/// Plans the rows of a configuration, with the base's values.
///
/// # Errors
/// A model without one embedding and one head, as [`token_groups`]; a token twice, or outside the table.
pub(crate) fn planned(survey: &Survey, config: &LoraConfig) -> Result<Vec<PlannedTokens>> {
    if config.trainable_token_indices.is_none() {
        return Ok(Vec::new());
    }
    let table = |path: &String| {
        let weight = format!("{path}.weight");
        survey.tensors.iter().find(|base| base.path == weight)
    };
    let of = |paths: &[&String]| match paths {
        [path] => table(path).map(|base| ((*path).clone(), base)),
        _ => None,
    };
    // As in PEFT.
    let of_tokens = survey.embeddings.iter().filter(|found| found.name != PER_LAYER_EMBEDDING);
    let embeddings: Vec<&String> = of_tokens.map(|found| &found.path).collect();
    let heads: Vec<&String> = survey.heads.iter().collect();
    let (Some((embedding, lookup)), Some((head, output))) = (of(&embeddings), of(&heads)) else {
        let remedy = "it needs a model with one embedding and one head that is a projection";
        return Err(unsupported(FIELD, "set", remedy));
    };
    let is_tied = lookup.identity == output.identity;
    let module = |name: &str| name.trim_end_matches(".weight").to_owned();
    let (embedding_name, head_name) = (module(&lookup.name), module(&output.name));
    let groups = token_groups(config, &embedding_name, &head_name, is_tied)?;
    let planned = groups.into_iter().map(|TokenGroup { in_embedding, in_head, tokens }| {
        let places = [(in_embedding, &embedding, &embedding_name, lookup), (in_head, &head, &head_name, output)];
        let places: Vec<_> = places.into_iter().filter(|(is_in, ..)| *is_in).collect();
        let table = &places[0].3.tensor;
        let Some(shape) = matrix_shape(table) else {
            return Err(unsupported(FIELD, "set", "the embedding is no matrix"));
        };
        let kind = if table.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let outside = tokens.iter().find(|token| !(0..shape[0]).contains(token));
        if let Some(token) = outside {
            return Err(Error::Invalid(format!(
                "`{FIELD}`: token {token} is outside the embedding's {} rows; resize the model's vocabulary first",
                shape[0]
            )));
        }
        let rows = rows_of(table, tokens, kind)?;
        TokenRows::new(tokens, rows.shallow_clone())?.check_against(shape)?;
        let parts = TokenParts {
            paths: places.iter().map(|(_, path, ..)| (*path).clone()).collect(),
            names: places.iter().map(|(.., base)| base.name.clone()).collect(),
            tokens: tokens.to_vec(),
            table: table.shallow_clone(),
        };
        let names: Vec<String> = places.iter().map(|(_, _, name, _)| format!("{name}.{TOKEN_ROWS}")).collect();
        let whole = PlannedWhole {
            paths: parts.row_paths(),
            keys: names[..1].to_vec(),
            names,
            tensor: rows,
            split: false,
        };
        Ok(PlannedTokens { parts, whole })
    });
    planned.collect()
}

/// Refuses rows of a table that the adapter also changes as a whole, or by low-rank terms.
///
/// # Errors
/// Such a table.
pub(crate) fn refuse_other_changes<'a>(
    survey: &Survey,
    planned: &PlannedTokens,
    sites: impl Iterator<Item = &'a PlannedSite> + Clone,
    wholes: &[PlannedWhole],
) -> Result<()> {
    for weight in &planned.parts.names {
        let identity = survey.tensors.iter().find(|base| base.name == *weight).map(|base| base.identity);
        let changed = |name: &String| {
            survey.tensors.iter().any(|base| base.name == *name && Some(base.identity) == identity)
        };
        let module = weight.trim_end_matches(".weight");
        if sites.clone().any(|site| changed(&format!("{}.weight", site.name))) {
            return Err(unsupported(
                FIELD,
                format!("set for `{module}`, which is adapted too"),
                "leave it out of `target_modules`, or train it by its adapter alone",
            ));
        }
        if wholes.iter().any(|whole| whole.names.iter().any(changed)) {
            return Err(unsupported(
                FIELD,
                format!("set for `{module}`, which is trained as a whole"),
                "leave it out of `modules_to_save`, or train it as a whole alone",
            ));
        }
    }
    Ok(())
}

/// Refuses tokens of a further adapter other than those of the model's parts.
///
/// # Errors
/// Other tokens.
pub(crate) fn refuse_other_tokens(known: &[TokenParts], planned: &[TokenParts]) -> Result<()> {
    for parts in planned {
        let other = known
            .iter()
            .find(|known| *known != parts && known.paths.iter().any(|path| parts.paths.contains(path)));
        if let Some(other) = other {
            return Err(unsupported(
                FIELD,
                format!(
                    "{:?} beside an adapter with {:?} for `{}`",
                    parts.tokens,
                    other.tokens,
                    other.paths.join("` and `")
                ),
                "give both adapters the same tokens in the same order",
            ));
        }
    }
    Ok(())
}

/// Returns the rows of the part at `path`, if it has trained ones.
pub(crate) fn of_part(
    path: &str,
    tokens: &[TokenParts],
    wholes: &[Whole],
) -> models::Result<Option<TokenRows>> {
    let Some(parts) = tokens.iter().find(|parts| parts.paths.iter().any(|known| known == path)) else {
        return Ok(None);
    };
    let paths = parts.row_paths();
    let whole = wholes.iter().find(|whole| whole.paths == paths);
    whole.map(|whole| TokenRows::new(&parts.tokens, whole.live.shallow_clone())).transpose()
}

/// Returns each table with the rows in it, by the path of its weight: one tensor for tied parts.
///
/// # Errors
/// A quantized table; rows that are not finite.
pub(crate) fn merged(tokens: &[TokenParts], wholes: &[Whole]) -> Result<Vec<(String, Tensor)>> {
    let _no_grad = tch::no_grad_guard();
    let mut tables = Vec::new();
    for parts in tokens {
        let Some(rows) = parts.paths.first().map(|path| of_part(path, tokens, wholes)).transpose()?.flatten()
        else {
            continue;
        };
        let part = parts.paths.join("` and `");
        if is_quantized(&parts.table) {
            return Err(Error::Invalid(format!(
                "rows of `{part}` cannot be merged into quantized ones; load the model in bfloat16, and merge there"
            )));
        }
        if rows.rows.f_isfinite()?.f_all()?.f_int64_value(&[])? == 0 {
            return Err(Error::Invalid(format!(
                "the trained rows of `{part}` are not finite; nothing was merged. Find out where the training diverged, or delete the \
                 adapter"
            )));
        }
        let values = rows.rows.f_to_kind(parts.table.kind())?;
        let table = parts.table.f_detach()?.f_index_copy(0, rows.tokens(), &values)?;
        tables.extend(parts.paths.iter().map(|path| (format!("{path}.weight"), table.shallow_clone())));
    }
    Ok(tables)
}
