//! A model's folder, as llama.cpp has to read it.

mod family;
mod keys;
mod names;
mod rope;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use decoder::{DecoderConfig, LM_HEAD, Sizes};

use crate::conversion::{self, Conversion, Planned, Rows, Values};
use crate::error::{Result, file_error, unsupported};
use crate::file_type::{self, FileType};
use crate::json::Fields;
use crate::safetensors::{Location, Tensors};
use crate::tensor_type::TensorType;
use crate::tokenizer::Tokenizer;
use crate::value::Value;
use crate::writer::TensorInfo;

pub(crate) use family::{Family, decoder, tensor_shape};
pub(crate) use names::{TensorName, gguf_name, stored_shape};
pub(crate) use rope::UNROTATED;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// The version of ggml's quantised types (`general.quantization_version`).
const QUANTIZATION_VERSION: u32 = 2;

/// An open model folder in Hugging Face's layout: `config.json`, the tokenizer's files, and weights in safetensors.
///
/// Only the names, dtypes and shapes of the weights are read; values are read while a conversion is written.
#[derive(Debug)]
pub struct Model {
    folder: PathBuf,
    config: Fields,
    family: &'static Family,
    decoder: DecoderConfig,
    sizes: Sizes,
    tensors: Tensors,
    /// Parts of the model that are not in the file.
    left_out: Vec<&'static str>,
    /// Whether the head is the embedding.
    tied: bool,
    tokenizer: Tokenizer,
    name: String,
}

impl Model {
    /// Opens a folder.
    ///
    /// # Errors
    /// A missing or invalid file; a `model_type`, an option or a tokenizer that llama.cpp or this crate does not support, by name.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_with(folder, folder)
    }

    /// Opens a folder, with the tokenizer, the chat template and `generation_config.json` of another.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_with(folder: &Path, tokenizer: &Path) -> Result<Self> {
        let config = Fields::read_config(&folder.join("config.json"))?;
        let family = Family::from_config(&config)?;
        let decoder = family::decoder(&config)?;
        family.check(&config, &decoder)?;
        let sizes = decoder.sizes();
        let mut tensors = Tensors::of_model(folder)?;
        let left_out = tensors.keep_text_model();
        let tied = ties(&config, family, &mut tensors)?;
        if !tied && !family.has_head {
            return Err(unsupported(
                format!("the output head of a `{}`", family.model_type),
                "that is not its embedding",
                "llama.cpp computes the logits of this family with the embedding",
            ));
        }
        let tokenizer = Tokenizer::read(tokenizer, &config)?;
        let real = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = real.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.unwrap_or_else(|| "model".to_owned());
        let folder = folder.to_owned();
        Ok(Self { folder, config, family, decoder, sizes, tensors, left_out, tied, tokenizer, name })
    }

    /// Sets the name in the file, `general.name`, which is the folder's otherwise.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    /// Writes that no token is put before a text: for a model whose chat template does not write the one that begins a text.
    /// llama.cpp puts it before every prompt otherwise, also before one that a template rendered.
    #[must_use]
    pub fn without_begin_token(mut self) -> Self {
        self.tokenizer.add_no_begin();
        self
    }

    /// Returns llama.cpp's name of the architecture, such as `qwen2`.
    pub fn architecture(&self) -> &'static str {
        self.family.architecture
    }

    /// Whether llama.cpp has a head for this family that is not the embedding.
    pub fn can_have_own_head(&self) -> bool {
        self.family.has_head
    }

    /// Returns the rows of the embedding: the number of tokens in the file.
    pub fn vocabulary(&self) -> u32 {
        u32::try_from(self.sizes.vocabulary).unwrap_or(u32::MAX)
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Plans the conversion: matrices are stored as the file type says, vectors as `f32`. Matrices whose rows are not whole blocks of their
    /// type get another one, as in llama.cpp (`f16`, or for K-quants `q5_0`, `q5_1` or `q8_0`), and [`Conversion::notes`] counts them.
    ///
    /// # Errors
    /// Tensors that are missing, unknown, or of another shape than in `config.json`.
    pub fn convert(&self, kind: FileType) -> Result<Conversion<'_>> {
        let mut plan = Vec::new();
        let mut notes = self.family.notes(&self.config)?;
        notes.extend(rope::note(&self.config, self.family, &self.sizes)?);
        notes.extend(self.left_out.iter().map(|part| format!("{part} is left out")));
        if !self.tied && self.config.flag("tie_word_embeddings", self.family.tied)? {
            notes.push(
                "config.json ties the head to the embedding, but the files have another head, which is used"
                    .to_owned(),
            );
        }
        let mut missing = self.needed();
        for (name, values) in rope::factors(&self.config, self.family, &self.sizes)? {
            let info =
                TensorInfo { name: name.to_owned(), shape: vec![values.len() as u64], kind: TensorType::F32 };
            plan.push(Planned { info, values: Values::Computed(values) });
        }
        let mut unknown = Vec::new();
        let mut experts: BTreeMap<String, BTreeMap<u64, Location>> = BTreeMap::new();
        for name in self.tensors.names() {
            if name.ends_with("rotary_emb.inv_freq") || !self.decoder.uses_tensor(name) {
                continue;
            }
            let Some(TensorName { name: new, transform, expert }) = gguf_name(self.family, &self.sizes, name)
            else {
                unknown.push(name);
                continue;
            };
            missing.retain(|needed| needed != name);
            let Some(location) = self.tensors.get(name) else { continue };
            self.check_shape(name, location)?;
            if let Some(expert) = expert {
                experts.entry(new).or_default().insert(expert, location.clone());
                continue;
            }
            plan.push(Planned {
                info: TensorInfo {
                    shape: stored_shape(&new, &location.shape),
                    kind: TensorType::F32,
                    name: new,
                },
                values: Values::Stored { location: location.clone(), rows: transform },
            });
        }
        for (name, locations) in experts {
            let locations: Vec<Location> = locations.into_values().collect();
            let count = self.sizes.experts.map_or(0, |experts| experts.count);
            if locations.len() as u64 != count {
                let reason =
                    format!("`{name}` has {} of {count} experts; get the files again", locations.len());
                return Err(file_error(&self.folder, reason));
            }
            let of_expert = locations.first().map(|location| location.shape.clone()).unwrap_or_default();
            let shape = std::iter::once(count).chain(of_expert).collect();
            let info = TensorInfo { name, shape, kind: TensorType::F32 };
            plan.push(Planned { info, values: Values::Experts(locations) });
        }
        if self.tied && self.family.head_required {
            // llama.cpp has no tied head for this architecture.
            if let Some(embedding) = self.tensors.get(EMBEDDING) {
                let (name, shape) = ("output.weight".to_owned(), embedding.shape.clone());
                let info = TensorInfo { name, shape, kind: TensorType::F32 };
                let values = Values::Stored { location: embedding.clone(), rows: Rows::default() };
                plan.push(Planned { info, values });
            }
        }
        self.refuse_differences(&missing, &unknown)?;
        notes.extend(self.tokenizer.notes().iter().cloned());
        conversion::sort(&mut plan);
        let shorter = kind.choose(self.choice(), plan.iter_mut().map(|planned| &mut planned.info));
        notes.extend(shorter_rows(&shorter));
        Ok(Conversion::new(self.metadata(kind)?, plan, &self.tensors, notes))
    }

    fn choice(&self) -> file_type::Decoder {
        let is_70b = self.sizes.layers == 80
            && match self.family.architecture {
                "llama" => self.sizes.heads != self.sizes.kv_heads,
                architecture => architecture == "qwen2",
            };
        file_type::Decoder {
            layers: self.sizes.layers,
            experts: self.sizes.experts.map_or(1, |experts| experts.count),
            is_70b,
        }
    }

    /// The names of the tensors that a model of these sizes has.
    fn needed(&self) -> Vec<String> {
        let shapes = self.decoder.shapes().into_iter().map(|(name, _)| name);
        let has_biases = self.family.has_clamped_experts;
        let names = shapes.filter(|name| name != LM_HEAD && (has_biases || !name.ends_with(".bias")));
        names.map(|name| format!("model.{name}")).chain((!self.tied).then(|| HEAD.to_owned())).collect()
    }

    fn refuse_differences(&self, missing: &[String], unknown: &[&str]) -> Result<()> {
        if let [first, ..] = missing {
            let reason =
                format!("{} tensors that config.json asks for are missing, such as `{first}`", missing.len());
            return Err(file_error(&self.folder, reason));
        }
        if let [first, ..] = unknown {
            return Err(unsupported(
                format!("a tensor of a `{}`", self.family.model_type),
                format!("`{first}`"),
                format!(
                    "llama.cpp has no place for it ({} such tensors); an adapter has to be merged first, and other models cannot \
                     be converted",
                    unknown.len()
                ),
            ));
        }
        Ok(())
    }

    /// The embedding and the head have a row for each token; permuted tensors have whole heads.
    fn check_shape(&self, name: &str, location: &Location) -> Result<()> {
        let expected = tensor_shape(&self.decoder, name);
        match expected {
            Some(expected) if expected != location.shape => Err(file_error(
                &self.folder,
                format!("`{name}` has the shape {:?}; config.json gives {expected:?}", location.shape),
            )),
            _ => Ok(()),
        }
    }

    /// Returns the name in the file. llama.cpp decides by it whether the text after Phi-3's special tokens is stripped, and then fails to
    /// load a vocabulary without certain tokens.
    fn name(&self) -> String {
        let name = self.name.clone();
        let is_named = ["phi3", "phi-3"].iter().any(|part| name.to_lowercase().contains(part));
        let has_tokens = self.tokenizer.has_all(&["</s>", "<unk>", "<s>", "<|endoftext|>"]);
        match (self.family.model_type == "phi3" && has_tokens, is_named) {
            (true, false) => format!("phi3-{name}"),
            (false, true) => "model".to_owned(),
            _ => name,
        }
    }

    fn metadata(&self, kind: FileType) -> Result<Vec<(String, Value)>> {
        let mut metadata: Vec<(String, Value)> = vec![
            ("general.architecture".to_owned(), self.family.architecture.into()),
            ("general.type".to_owned(), "model".into()),
            ("general.name".to_owned(), self.name().into()),
            ("general.file_type".to_owned(), kind.number().into()),
            ("general.quantization_version".to_owned(), QUANTIZATION_VERSION.into()),
        ];
        metadata.extend(keys::keys(&self.config, self.family, &self.decoder)?);
        metadata.extend(rope::keys(&self.config, self.family, &self.sizes)?);
        metadata.extend(self.tokenizer.metadata(self.vocabulary())?);
        Ok(metadata)
    }
}

/// Decides whether the head is the embedding, as transformers 5 does: `config.json` is followed unless the files have both with different
/// values. A copy of the embedding is left out, and a single matrix under the head's name is the embedding.
pub(crate) fn ties(config: &Fields, family: &Family, tensors: &mut Tensors) -> Result<bool> {
    if !config.flag("tie_word_embeddings", family.tied)? {
        return Ok(false);
    }
    if tensors.get(EMBEDDING).is_none() {
        tensors.rename(HEAD, EMBEDDING);
    } else if !tensors.is_copy(HEAD, EMBEDDING)? {
        return Ok(false);
    }
    tensors.remove(HEAD);
    Ok(true)
}

/// Returns a note for each type that stands for another.
fn shorter_rows(tensors: &[(&TensorInfo, usize)]) -> Vec<String> {
    let mut groups: Vec<(TensorType, usize, Vec<&str>)> = Vec::new();
    for (tensor, block) in tensors {
        match groups.iter_mut().find(|(kind, length, _)| (*kind, *length) == (tensor.kind, *block)) {
            Some((_, _, names)) => names.push(&tensor.name),
            None => groups.push((tensor.kind, *block, vec![&tensor.name])),
        }
    }
    let note = |(kind, block, names): (TensorType, usize, Vec<&str>)| match names[..] {
        [name] => format!(
            "1 matrix is stored as {kind}, because its rows are not a multiple of {block} long: {name}"
        ),
        _ => format!(
            "{} matrices are stored as {kind}, because their rows are not a multiple of {block} long: {}, …",
            names.len(),
            names[0]
        ),
    };
    groups.into_iter().map(note).collect()
}
