//! The flags that belong to the keys of a configuration.

/// Keys, and the flags of `train` and `finetune` that set them.
const FLAGS: [(&str, &str); 32] = [
    ("activations.plan", "--activations"),
    ("activations.recompute", "--recompute-what"),
    ("data.limit", "--limit"),
    ("data.packing", "--packing"),
    ("data.source", "--data"),
    ("loss.chunk_tokens", "--loss-chunk"),
    ("loss.head", "--loss"),
    ("mlp.level", "--mlp"),
    ("model.dtype", "--dtype"),
    ("model.name", "--model"),
    ("offload", "--offload"),
    ("offload.method", "--offload-method"),
    ("offload.resident", "--resident"),
    ("offload.ring", "--ring"),
    ("offload.tier", "--offload"),
    ("optimizer.clip", "--clip"),
    ("optimizer.lr", "--lr"),
    ("optimizer.place", "--optimizer-on"),
    ("optimizer.rule", "--optimizer"),
    ("optimizer.schedule", "--schedule"),
    ("optimizer.warmup", "--warmup"),
    ("optimizer.weight_decay", "--weight-decay"),
    ("precision.compute", "--precision"),
    ("training.accumulation", "--accumulation"),
    ("training.batch", "--batch-size"),
    ("training.budget", "--budget"),
    ("training.checkpoint_every", "--checkpoint-every"),
    ("training.epochs", "--epochs"),
    ("training.evaluate_every", "--evaluate-every"),
    ("training.keep", "--keep"),
    ("training.log_every", "--log-every"),
    ("training.steps", "--steps"),
];

/// Puts the flag behind each key that an error about a configuration names.
pub(crate) fn named(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(frugal::Error::Value { .. } | frugal::Error::Conflict { .. }) => {
            anyhow::Error::msg(with_flags(&error.to_string()))
        }
        _ => error,
    }
}

fn with_flags(message: &str) -> String {
    let mut text = String::new();
    for (at, part) in message.split('`').enumerate() {
        // Every second part is between backticks.
        if at % 2 == 0 {
            text += part;
            continue;
        }
        text += &format!("`{part}`");
        let (key, value) = part.split_once(" = ").unwrap_or((part, ""));
        if let Some((_, flag)) = FLAGS.iter().find(|(of, _)| *of == key) {
            text += &format!(" ({})", format!("{flag} {}", value.trim_matches('"')).trim_end());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::with_flags;

    #[test]
    fn keys_have_their_flags_behind_them() {
        assert_eq!(with_flags("`training.steps` is 0"), "`training.steps` (--steps) is 0");
        assert_eq!(
            with_flags("`offload.tier = \"file\"` and `model.freeze`; take `offload`"),
            "`offload.tier = \"file\"` (--offload file) and `model.freeze`; take `offload` (--offload)"
        );
    }
}
