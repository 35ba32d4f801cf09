//! `frugal plan flops`

use accounting::decoder_flops::{Flops, rule_of_thumb, step};
use accounting::lora;
use accounting::quantity::grouped;
use serde_json::{Value, json};

use super::Answer;
use super::model_args::ModelArgs;
use super::step_args::{LoraArgs, RecomputeArgs, WorkArgs};
use super::table::{flops_json, flops_text, rule, table};

#[derive(clap::Args)]
pub(crate) struct FlopsArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    work: WorkArgs,
    #[command(flatten)]
    recompute: RecomputeArgs,
    #[command(flatten)]
    lora: LoraArgs,
}

impl FlopsArgs {
    pub(crate) fn answer(&self) -> anyhow::Result<Answer> {
        let (model, lora) = self.lora.low_rank(&self.model, self.model.decoder()?)?;
        let work = self.work.workload(&model);
        let recomputation = self.recompute.recomputation();
        let exact = match lora {
            Some(lora) => lora::flops::step(&model, &lora, work, None, &recomputation)?,
            None => step(&model, work, &recomputation)?,
        };
        let rule_of_thumb = rule_of_thumb(&model, work)?;
        let (total, hardware) = (exact.model()?, exact.hardware()?);

        let mut rows = Vec::new();
        let mut row = |name: &str, times: Option<u64>, flops: Flops| {
            let share = 100.0 * flops.dense as f64 / exact.forward.dense as f64;
            rows.push(vec![
                name.to_owned(),
                times.map_or(String::new(), |n| n.to_string()),
                flops_text(flops.dense),
                flops_text(flops.causal),
                format!("{share:.1} %"),
            ]);
        };
        for product in &exact.rows {
            row(&product.name, Some(product.times), product.forward);
        }
        let products = exact.rows.len();
        row("forward", None, exact.forward);
        row("backward", None, exact.backward);
        row("recomputed", None, exact.recomputed);
        row("model (forward + backward)", None, total);
        row("hardware (recomputed too)", None, hardware);
        rows.insert(products, rule());

        let sequence = work.sequence;
        let mut text = format!("{}, batch {} × {sequence} tokens\n\n", self.model.name(), work.batch);
        text += &table(&["product", "times", "dense FLOPs", "causal FLOPs", "of forward"], &rows);
        text += "\nNot counted: norms, activation functions, softmax, rotary positions, biases, the loss and the \
                 optimizer.\nEmbedding lookups are 0 FLOPs.\n\n";
        let percent = |error: f64| format!("{:+.1} %", 100.0 * error);
        let rule_row = |name: &str, n: u64, flops: u128, error: f64| {
            vec![name.to_owned(), grouped(n.into()), flops_text(flops), percent(error)]
        };
        text += &table(
            &["6·N·D with N =", "N", "FLOPs", "against exact"],
            &[
                rule_row(
                    "all parameters",
                    rule_of_thumb.parameters,
                    rule_of_thumb.rule,
                    rule_of_thumb.error(),
                ),
                rule_row(
                    "weights in products",
                    rule_of_thumb.product_parameters,
                    rule_of_thumb.product_rule,
                    rule_of_thumb.product_error(),
                ),
            ],
        );
        text += &format!(
            "\nThe second row misses attention alone, which grows with the sequence; the first counts embeddings and \
             norms too.\nD is {} tokens; exact is forward + backward with dense attention.\n",
            grouped(work.tokens()?.into())
        );

        let both =
            |flops: Flops| json!({"dense": flops_json(flops.dense), "causal": flops_json(flops.causal)});
        let products: Vec<Value> = exact
            .rows
            .iter()
            .map(|product| {
                json!({
                    "product": product.name,
                    "part": product.part.name(),
                    "times": product.times,
                    "flops": both(product.forward),
                })
            })
            .collect();
        let json = json!({
            "model": self.model.name(),
            "batch_size": work.batch,
            "length": sequence,
            "products": products,
            "forward": both(exact.forward),
            "backward": both(exact.backward),
            "recomputed": both(exact.recomputed),
            "model_flops": both(total),
            "hardware_flops": both(hardware),
            "rule": {
                "parameters": rule_of_thumb.parameters,
                "flops": flops_json(rule_of_thumb.rule),
                "product_parameters": rule_of_thumb.product_parameters,
                "product_flops": flops_json(rule_of_thumb.product_rule),
            },
        });
        Ok(Answer::new(text, json))
    }
}
