//! Frozen models beside that which learns, of the same tokens: the teacher of a distillation, the reference of preferences.

use dataloading::Tokenizer;
use fused_ce::LinearCrossEntropy;
use kernels::quantized::blocks;
use models::hugging_face::Folder;
use models::module::LanguageModel;
use offload::{Offload, Tier};
use tch::{Device, Kind};

use crate::config::{Config, TeacherPlace};
use crate::error::{Error, Result};

/// Layers of an offloaded teacher on the device at a time: one that runs, and one in transfer.
pub(crate) const TEACHER_RING: usize = 2;

/// A teacher, ready to be learned from.
#[derive(Debug)]
pub struct Teacher {
    /// The frozen model.
    pub model: Box<dyn LanguageModel>,
    /// Its layers, if they are offloaded.
    pub offload: Option<Offload>,
}

impl Teacher {
    /// Opens the teacher of `config` from its folder onto `device`, offloaded if the configuration says so.
    ///
    /// # Errors
    /// Errors of [`Folder::load`] and of [`Offload::open`].
    pub fn open(config: &Config, folder: &Folder, device: Device) -> Result<Self> {
        let kind = Self::kind(config, folder)?;
        if config.objective.teacher_place != TeacherPlace::Offloaded {
            return Self::new(Box::new(folder.load(Some(kind), device)?), None);
        }
        let own = config.offload.clone().unwrap_or_default();
        let tier = match device {
            Device::Cpu => Tier::File(own.folder.clone().unwrap_or_else(std::env::temp_dir)),
            _ => Tier::Host,
        };
        let options = offload::OffloadConfig {
            device,
            tier,
            ring: TEACHER_RING,
            pinned: own.pinned,
            ..offload::OffloadConfig::default()
        };
        let (model, offload) = Offload::open(folder, Some(kind), &options)?;
        Self::new(Box::new(model), Some(offload))
    }

    /// Makes a model a teacher, whose logits are computed in parts.
    ///
    /// # Errors
    /// A head that is not one projection.
    pub fn new(mut model: Box<dyn LanguageModel>, offload: Option<Offload>) -> Result<Self> {
        LinearCrossEntropy::default().install(model.as_mut())?;
        Ok(Self { model, offload })
    }

    /// Returns the dtype of a teacher's weights: that which is asked for, or that of the files, which of a GGUF file are its blocks.
    ///
    /// # Errors
    /// Weights of several dtypes.
    pub fn kind(config: &Config, folder: &Folder) -> Result<Kind> {
        match config.objective.teacher_dtype {
            Some(dtype) => Ok(dtype.kind()),
            None if folder.gguf_file().is_some() => Ok(blocks::KIND),
            None => Ok(folder.kind()?),
        }
    }
}

/// What another model is for the model that learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Its distributions are learned.
    Teacher,
    /// Its log-probabilities of answers are compared with.
    Reference,
}

impl Role {
    /// Returns the standard term.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Teacher => "teacher",
            Self::Reference => "reference",
        }
    }
}

/// Checks that another model reads and predicts the tokens of the model that learns, whose rows have at most `longest` positions.
///
/// # Errors
/// [`Error::OtherModel`]: another token under an id of both, a token that the other model does not have, a shorter context.
pub fn check_tokens(
    role: Role,
    (own_tokens, own_name): (&Tokenizer, &str),
    (tokens, name): (&Tokenizer, &str),
    folder: &Folder,
    longest: usize,
) -> Result<()> {
    let of_role = role.name();
    let refuse = |reason: String| {
        Err(Error::OtherModel { role: of_role, model: own_name.to_owned(), other: name.to_owned(), reason })
    };
    let rows = folder.config().vocab_size;
    for id in 0..own_tokens.vocabulary() as u32 {
        let (own, theirs) = (own_tokens.token(id), tokens.token(id));
        match (own, theirs) {
            // Ids without a token are in no row.
            (None, _) => {}
            (Some(own), Some(theirs)) if own == theirs && i64::from(id) < rows => {}
            (Some(own), Some(theirs)) if own == theirs => {
                return refuse(format!(
                    "the {of_role} has {rows} rows of its embedding, and none for the token {id}, {own:?}"
                ));
            }
            (Some(own), theirs) => {
                let theirs = theirs.map_or_else(|| "no token".to_owned(), |token| format!("{token:?}"));
                return refuse(format!(
                    "their tokenizers differ: the token {id} is {own:?} of the model, and {theirs} of the {of_role}; take a {of_role} with the model's \
                     tokenizer, as other models of its family have it"
                ));
            }
        }
    }
    let context = usize::try_from(folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    if longest > context {
        return refuse(format!(
            "rows have up to {longest} positions, and the {of_role} reads {context}; give --max-length {context}"
        ));
    }
    Ok(())
}
