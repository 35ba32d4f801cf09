//! The log-probabilities of answers by the model at the start, or by another, for objectives that compare with it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use frugal::Config;
use frugal::companion_files::CompanionFiles;
use frugal::config::ObjectiveKind;
use frugal::models::hugging_face::Folder;
use frugal::models::tensors_file;
use frugal::recipe::{Role, Teacher};
use frugal::training::masked_rows::MaskedBatches;
use frugal::training::preference::log_probabilities_of_rows;
use tch::{Device, Tensor};

use super::other_model;
use crate::common_flags::Common;
use crate::output::figures::counted;
use crate::run::job::{Job, Ready};

/// The file in the output folder: 4 bytes for each answer, 8 for a rated one.
const FILE: &str = "reference.safetensors";

/// Log-probabilities of rows, by the digest of the rows.
type Known = Vec<(String, Tensor)>;

/// Another model than that at the start, whose weights are not read yet.
pub(super) struct ReferenceFolder {
    folder: Folder,
    name: String,
}

impl ReferenceFolder {
    /// Opens the folder of `objective.reference_model`, if it is set.
    ///
    /// # Errors
    /// No such folder; a model of other tokens, or of a shorter context than `longest` positions.
    pub(super) fn open(
        job: &Job<'_>,
        companions: &CompanionFiles,
        longest: usize,
    ) -> anyhow::Result<Option<Self>> {
        let Some(name) = job.config().objective.reference_model.clone() else { return Ok(None) };
        let folder = other_model::open(job, Role::Reference, &name, &companions.tokenizer()?, longest)?;
        Ok(Some(Self { folder, name }))
    }

    /// Writes its log-probabilities of the rows of `all` into the output folder, unless they are there. Its weights are held meanwhile.
    ///
    /// # Errors
    /// Errors of its weights and of the rows; a file that cannot be written.
    pub(super) fn ask(
        &self,
        (common, config): (&Common, &Config),
        out: &Path,
        all: &[&MaskedBatches],
        device: Device,
    ) -> anyhow::Result<()> {
        let known = known(out)?;
        let is_known = all.iter().all(|rows| known.iter().any(|(own, _)| *own == digest(rows)));
        if common.is_first() && !is_known {
            let (start, mut computed) = (Instant::now(), Vec::new());
            let reference = Teacher::open(config, &self.folder, device)?;
            for rows in all {
                let values = log_probabilities_of_rows(reference.model.as_ref(), rows, None)?;
                computed.push((digest(rows), Tensor::f_from_slice(&values)?));
            }
            let examples = all.iter().map(|rows| rows.examples()).sum();
            write(
                common,
                config,
                out,
                &computed,
                (&format!("the reference {}", self.name), examples, start),
            )?;
        }
        // The other ranks wait for the file.
        common.on_every_rank(true, "log-probabilities of the reference")?;
        Ok(())
    }
}

fn digest(rows: &MaskedBatches) -> String {
    format!("{:016x}", rows.content())
}

fn known(out: &Path) -> anyhow::Result<Known> {
    let path = out.join(FILE);
    Ok(if path.is_file() { tensors_file::read(&path, Device::Cpu)? } else { Vec::new() })
}

/// Writes log-probabilities, each once: training and validation data may be the same. Says which model has computed how many, and since when.
fn write(
    common: &Common,
    config: &Config,
    out: &Path,
    computed: &Known,
    (model, examples, start): (&str, usize, Instant),
) -> anyhow::Result<()> {
    let path = out.join(FILE);
    let is_new = |at: usize| computed[..at].iter().all(|(own, _)| *own != computed[at].0);
    let once: Known = (0..computed.len())
        .filter(|at| is_new(*at))
        .map(|at| (computed[at].0.clone(), computed[at].1.shallow_clone()))
        .collect();
    tensors_file::write(&path, &once)?;
    let unit = if config.objective.kind == ObjectiveKind::Kto { "answer" } else { "pair" };
    common.note(&format!(
        "{model} has computed {} in {:.0} s: {}",
        counted(examples as u64, unit),
        start.elapsed().as_secs_f64(),
        path.display()
    ));
    Ok(())
}

/// Gives the batches the log-probabilities that the objective compares with, if it asks for them before the training: those of the output
/// folder, or else of the model at the start for all rows, which are then written there.
///
/// # Errors
/// Rows that cannot be read; a file that cannot be written, or that lacks what another model has computed; errors of the model.
pub(super) fn with_reference(
    ready: &Ready<'_>,
    out: &Path,
    (train, validation): (MaskedBatches, Option<MaskedBatches>),
) -> anyhow::Result<(MaskedBatches, Option<MaskedBatches>)> {
    let (config, common) = (&ready.run.config, &ready.run.common);
    if !config.objective.is_computed_before(config.adapter.is_some()) {
        return Ok((train, validation));
    }
    let (known, start, mut examples, mut all) = (known(out)?, Instant::now(), 0, Known::new());
    let mut given = |batches: MaskedBatches| -> anyhow::Result<MaskedBatches> {
        let name = digest(&batches);
        let own = known.iter().chain(&all).find(|(own, _)| *own == name);
        // Ranks compute them together.
        let is_known = common.on_every_rank(own.is_some(), "known log-probabilities")?;
        let values: Arc<[f32]> = match own.filter(|_| is_known) {
            Some((_, values)) => Vec::<f32>::try_from(values)?.into(),
            None if config.objective.reference_model.is_some() => bail!(
                "{} lacks what the reference has computed on the first rank; give every rank the same --out",
                out.join(FILE).display()
            ),
            None => {
                examples += batches.examples();
                ready.log_probabilities(&batches)?
            }
        };
        all.push((name, Tensor::f_from_slice(&values)?));
        Ok(batches.with_reference(values)?)
    };
    let (train, validation) = (given(train)?, validation.map(&mut given).transpose()?);
    if examples > 0 && common.is_first() {
        write(common, config, out, &all, ("the model at the start", examples, start))?;
    }
    Ok((train, validation))
}
