//! The trained weights as files: the last and the best.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use frugal::models::module::LanguageModel;
use frugal::run_folder::BEST;
use frugal::training::optimizer::Optimizer;
use frugal::training::trainer::{Best, BestWeights};

use crate::common_flags::Common;

/// The evaluation whose weights [`BEST`] has, within an output folder.
const BEST_EVALUATION: &str = "best.json";

/// Writes what is trained. The other ranks give rank 0 their parts of the weights.
pub(crate) trait Writer {
    /// The kind of weights that it writes: `adapter` or `model`.
    fn what(&self) -> &'static str;

    /// Writes a folder, which appears whole; `optimizer` brings the weights.
    ///
    /// # Errors
    /// A folder that cannot be written; a rank that failed.
    fn write(&self, model: &dyn LanguageModel, optimizer: &dyn Optimizer, path: &Path) -> anyhow::Result<()>;
}

/// Keeps the weights of the best evaluation in the output folder.
pub(crate) struct KeepBest {
    pub(crate) common: Common,
    pub(crate) writer: Rc<dyn Writer>,
    pub(crate) out: PathBuf,
}

impl BestWeights for KeepBest {
    fn keep(
        &mut self,
        model: &dyn LanguageModel,
        optimizer: &dyn Optimizer,
        best: &Best,
    ) -> training::Result<()> {
        let path = self.out.join(BEST);
        let saved = self.writer.write(model, optimizer, &path);
        let saved = self.common.first_failure(self.writer.what(), saved).and_then(|()| {
            if self.common.is_first() {
                fs::write(self.out.join(BEST_EVALUATION), serde_json::to_vec(best)?)?;
            }
            Ok(())
        });
        saved.map_err(|error| training::Error::io(path, io::Error::other(format!("{error:#}"))))
    }
}

/// Removes the best weights of an output folder, where a training begins again: those of an earlier start are not its own.
///
/// # Errors
/// Any error of the file system.
pub(crate) fn forget_best(out: &Path) -> io::Result<()> {
    let is_gone = |cause: &io::Error| cause.kind() == io::ErrorKind::NotFound;
    for removed in [fs::remove_file(out.join(BEST_EVALUATION)), fs::remove_dir_all(out.join(BEST))] {
        removed.or_else(|cause| if is_gone(&cause) { Ok(()) } else { Err(cause) })?;
    }
    Ok(())
}

/// Reads the evaluation whose weights an output folder has as the best; `None` if it has none.
pub(crate) fn best_evaluation(out: &Path) -> Option<Best> {
    let bytes = fs::read(out.join(BEST_EVALUATION)).ok()?;
    serde_json::from_slice(&bytes).ok().filter(|_| out.join(BEST).is_dir())
}
