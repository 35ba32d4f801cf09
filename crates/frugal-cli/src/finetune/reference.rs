//! The log-probabilities of answers by the model at the start, for objectives that compare with it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use frugal::config::ObjectiveKind;
use frugal::models::tensors_file;
use frugal::training::masked_rows::MaskedBatches;
use tch::{Device, Tensor};

use crate::output::figures::counted;
use crate::run::job::Ready;

/// The file in the output folder: 4 bytes for each answer, 8 for a rated one.
const FILE: &str = "reference.safetensors";

/// Gives the batches the log-probabilities of the model at the start, if the objective asks for them before the training: those of the output
/// folder, or else of a pass over all rows, which are then written there.
///
/// # Errors
/// Rows that cannot be read; a file that cannot be written; errors of the model.
pub(super) fn with_reference(
    ready: &Ready<'_>,
    out: &Path,
    (train, validation): (MaskedBatches, Option<MaskedBatches>),
) -> anyhow::Result<(MaskedBatches, Option<MaskedBatches>)> {
    let config = &ready.run.config;
    if !config.objective.is_computed_before(config.adapter.is_some()) {
        return Ok((train, validation));
    }
    let path = out.join(FILE);
    let known = if path.is_file() { tensors_file::read(&path, Device::Cpu)? } else { Vec::new() };
    let (start, mut computed) = (Instant::now(), 0);
    let mut written: Vec<(String, Tensor)> = Vec::new();
    let mut given = |batches: MaskedBatches| -> anyhow::Result<MaskedBatches> {
        let name = format!("{:016x}", batches.content());
        let own = known.iter().find(|(own, _)| *own == name);
        // Ranks compute them together.
        let is_known = ready.run.common.on_every_rank(own.is_some(), "known log-probabilities")?;
        let values: Arc<[f32]> = match own.filter(|_| is_known) {
            Some((_, values)) => Vec::<f32>::try_from(values)?.into(),
            None => {
                let values = ready.log_probabilities(&batches)?;
                computed += batches.examples();
                values
            }
        };
        // Training and validation data may be the same.
        if written.iter().all(|(own, _)| *own != name) {
            written.push((name, Tensor::f_from_slice(&values)?));
        }
        Ok(batches.with_reference(values)?)
    };
    let (train, validation) = (given(train)?, validation.map(&mut given).transpose()?);
    if computed > 0 && ready.run.common.is_first() {
        tensors_file::write(&path, &written)?;
        ready.run.common.note(&format!(
            "the model at the start has computed {} in {:.0} s: {}",
            counted(
                computed as u64,
                if config.objective.kind == ObjectiveKind::Kto { "answer" } else { "pair" }
            ),
            start.elapsed().as_secs_f64(),
            path.display()
        ));
    }
    Ok((train, validation))
}
