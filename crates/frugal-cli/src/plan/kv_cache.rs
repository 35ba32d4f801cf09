//! `frugal plan kv-cache`

use accounting::Dtype;
use accounting::memory::kv_cache;
use accounting::quantity::{bytes_text, grouped};
use serde_json::json;

use super::Answer;
use super::model_args::ModelArgs;
use super::step_args::{DeviceMemoryArgs, WorkArgs};
use super::table::table;

#[derive(clap::Args)]
pub(crate) struct KvCache {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    work: WorkArgs,
    /// Number format of the cache and of the parameters
    #[arg(long, default_value = "bf16", value_name = "NAME")]
    dtype: Dtype,
    #[command(flatten)]
    device: DeviceMemoryArgs,
}

impl KvCache {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let model = self.model.decoder()?;
        let work = self.work.workload(&model);
        let states = kv_cache::recurrent_bytes(&model, 1, self.dtype)?;
        let token = kv_cache::token_bytes(&model, self.dtype)?;
        let cache = kv_cache::bytes(&model, work, self.dtype)?;
        let parameters = self.dtype.bytes(model.parameters()?)?;
        let row = |name: &str, bytes: u64| vec![name.to_owned(), bytes_text(bytes)];
        let mut rows = vec![
            row("per token", token),
            row(&format!("{} × {} tokens", work.batch, work.sequence), cache),
            row("parameters", parameters),
        ];
        let mut json = json!({
            "model": self.model.name(),
            "dtype": self.dtype.name(),
            "batch_size": work.batch,
            "length": work.sequence,
            "bytes_per_token": token,
            "cache_bytes": cache,
            "parameter_bytes": parameters,
        });
        if states > 0 {
            rows.insert(1, row("states of linear attention, per sequence", states));
            json["bytes_per_sequence"] = states.into();
        }
        if let Some(available) = self.device.bytes() {
            let tokens = kv_cache::tokens_beside_parameters(&model, self.dtype, available)?;
            rows.push(vec![
                format!("tokens that fit beside the parameters in {}", bytes_text(available)),
                grouped(tokens.into()),
            ]);
            json["tokens_that_fit"] = tokens.into();
        }
        let mut text = format!("{}, {}\n\n", self.model.name(), self.dtype);
        text += &table(&["keys and values", "size"], &rows);
        if model.heads > model.kv_heads {
            text += &format!(
                "\n{} key-value heads for {} query heads: {} times less than without grouping.\n",
                model.kv_heads,
                model.heads,
                model.heads / model.kv_heads
            );
        }
        Ok(Answer::new(text, json))
    }
}
