//! The teacher of a distillation: a frozen model of the student's tokens.

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

/// Checks that a teacher of `teacher_tokens` reads and predicts the tokens of a student, whose rows have at most `longest` positions.
///
/// # Errors
/// [`Error::Teacher`]: another token under an id of both, a token of the student that the teacher does not have, a shorter context.
pub fn check_teacher(
    (student, student_name): (&Tokenizer, &str),
    (teacher, teacher_name): (&Tokenizer, &str),
    teacher_folder: &Folder,
    longest: usize,
) -> Result<()> {
    let refuse = |reason: String| {
        Err(Error::Teacher { student: student_name.to_owned(), teacher: teacher_name.to_owned(), reason })
    };
    let rows = teacher_folder.config().vocab_size;
    for id in 0..student.vocabulary() as u32 {
        let (own, theirs) = (student.token(id), teacher.token(id));
        match (own, theirs) {
            // Ids without a token are in no row.
            (None, _) => {}
            (Some(own), Some(theirs)) if own == theirs && i64::from(id) < rows => {}
            (Some(own), Some(theirs)) if own == theirs => {
                return refuse(format!(
                    "the teacher has {rows} rows of its embedding, and none for the token {id}, {own:?}"
                ));
            }
            (Some(own), theirs) => {
                let theirs = theirs.map_or_else(|| "no token".to_owned(), |token| format!("{token:?}"));
                return refuse(format!(
                    "their tokenizers differ: the token {id} is {own:?} of the student, and {theirs} of the teacher; take a teacher with the student's \
                     tokenizer, as larger models of its family have it"
                ));
            }
        }
    }
    let context = usize::try_from(teacher_folder.config().max_position_embeddings).unwrap_or(usize::MAX);
    if longest > context {
        return refuse(format!(
            "rows have up to {longest} positions, and the teacher reads {context}; give --max-length {context}"
        ));
    }
    Ok(())
}
