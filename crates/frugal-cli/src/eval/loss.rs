//! The mean loss on rows that are made as in a training.

use std::path::PathBuf;

use frugal::companion_files::CompanionFiles;
use frugal::config::DataConfig;
use frugal::fused_ce::LinearCrossEntropy;
use frugal::rows::{self, Found as FoundData};
use frugal::training::evaluation::evaluate;
use frugal::training::masked_rows::{Arrangement, Layout, MaskedBatches};
use serde_json::json;

use super::Eval;
use crate::common_flags::Common;
use crate::flags::model::{Found, not_finite, with_adapter};
use crate::flags::rows::encoder;
use crate::flags::tokenizer::Ends;
use crate::output::figures::{counted, grouped};
use crate::output::print_fields;

pub(super) fn run(
    common: &Common,
    arguments: &Eval,
    found: &Found,
    (files, detected, data): (&[PathBuf], &FoundData, &DataConfig),
) -> anyhow::Result<()> {
    let device = common.device()?;
    let folder = &found.folder;
    let companions = CompanionFiles::of(folder, found.adapter.as_deref(), data)?;
    let ends = Ends::find(folder, &companions, data)?;
    let encoder = encoder(folder, companions.chat_template(data)?, data, &ends)?;
    let rows = match detected {
        FoundData::Records(records) => rows::prepare(files, &encoder, records, arguments.limit)?.rows,
        _ => rows::texts(files, &encoder, arguments.limit)?,
    };
    let count = rows.len();
    let layout = Layout {
        batch: arguments.batch_size as usize,
        arrangement: Arrangement::PaddingFree,
        pad: i64::from(ends.end),
        ..Layout::default()
    };
    let mut batches = MaskedBatches::over(&rows, layout.of_evaluation(), device)?;
    let mut model = with_adapter(arguments.model.load(folder, device)?, found.adapter.as_deref())?;
    // A chunk of logits at a time, unless the head is more than a projection, because it is adapted itself.
    match LinearCrossEntropy::default().install(model.as_mut()) {
        Ok(_) | Err(runtime::Error::Unsupported(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let measured = evaluate(model.as_ref(), &mut batches, 0)?;
    if !measured.loss.is_finite() {
        return Err(not_finite(model.as_ref(), measured.loss)?);
    }
    let tokens =
        format!("{} of {}", counted(measured.targets, "trained token"), counted(count as u64, "row"));
    print_fields(
        common.json,
        vec![
            ("loss", format!("{:.4} nats per trained token", measured.loss), json!(measured.loss)),
            ("perplexity", format!("{:.3}", measured.perplexity), json!(measured.perplexity)),
            (
                "accuracy",
                format!("{:.2} % of the tokens are the most probable ones", 100.0 * measured.accuracy),
                json!(measured.accuracy),
            ),
            ("tokens", tokens, json!(measured.targets)),
            ("rows", grouped(count as u64), json!(count)),
            ("seconds", format!("{:.1}", measured.seconds), json!(measured.seconds)),
        ],
    );
    Ok(())
}
