//! `frugal plan parameters`: counts a model's parameters by part, and lists its tensors.

use accounting::quantity::{count_text, grouped};
use serde_json::json;

use super::Answer;
use super::model_args::ModelArgs;
use super::table::{rule, table};

#[derive(clap::Args)]
pub(crate) struct Parameters {
    #[command(flatten)]
    model: ModelArgs,
    /// List every tensor with its shape
    #[arg(long)]
    list: bool,
}

impl Parameters {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let model = self.model.decoder()?;
        let total = model.parameters()?;
        let mut text = String::new();
        let mut json = json!({
            "model": self.model.name(),
            "parameters": total,
            "product_parameters": model.product_parameters()?,
        });
        if self.list {
            let (mut rows, mut values) = (Vec::new(), Vec::new());
            for tensor in model.parameter_tensors()? {
                let elements = tensor.elements()?;
                rows.push(vec![tensor.name.clone(), format!("{:?}", tensor.shape), grouped(elements.into())]);
                values.push(json!({"name": tensor.name, "shape": tensor.shape, "parameters": elements}));
            }
            text += &table(&["tensor", "shape", "parameters"], &rows);
            text.push('\n');
            json["tensors"] = values.into();
        }
        let mut rows = Vec::new();
        for (part, count) in model.parameters_by_part()? {
            let share = format!("{:.1} %", 100.0 * count as f64 / total as f64);
            rows.push(vec![part.name().to_owned(), grouped(count.into()), share]);
            json["parts"][part.name()] = count.into();
        }
        rows.push(rule());
        rows.push(vec!["total".into(), grouped(total.into()), count_text(total)]);
        if model.experts.is_some() {
            let active = model.active_parameters()?;
            rows.push(vec!["active for a token".into(), grouped(active.into()), count_text(active)]);
            json["active_parameters"] = active.into();
        }
        text += &table(&["part", "parameters", "share"], &rows);
        if model.tied {
            text += "\nThe output projection is tied to the embedding and counted there.\n";
        }
        Ok(Answer::new(text, json))
    }
}
