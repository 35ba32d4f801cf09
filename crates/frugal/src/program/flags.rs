//! The flags that belong to the keys of a configuration.

pub(crate) mod adapter;
pub(crate) mod encoding;
pub(crate) mod hub;
pub(crate) mod model;
pub(crate) mod no_effect;
pub(crate) mod origins;
pub(crate) mod other_names;
pub(crate) mod rows;
pub(crate) mod run;
pub(crate) mod sampling;
pub(crate) mod settings;
pub(crate) mod unread;

/// Heading of the flags about data in a subcommand's help.
pub(crate) const DATA: &str = "Data";

/// Keys, and the flags of `train` and `finetune` that set them, each key's usual one first.
const FLAGS: [(&str, &str); 79] = [
    ("activations.plan", "--activations"),
    ("activations.plan", "--recompute"),
    ("activations.recompute", "--recompute-what"),
    ("adapter.init_lora_weights", "--init"),
    ("adapter.lora_alpha", "--alpha"),
    ("adapter.lora_dropout", "--dropout"),
    ("adapter.r", "--r"),
    ("adapter.target_modules", "--targets"),
    ("adapter.target_modules", "--target-pattern"),
    ("adapter.use_dora", "--dora"),
    ("adapter.use_rslora", "--rslora"),
    ("data.chat_template", "--chat-template"),
    ("data.completion_template", "--completion-template"),
    ("data.end_token", "--end-token"),
    ("data.field", "--field"),
    ("data.format", "--format"),
    ("data.held_out", "--held-out"),
    ("data.limit", "--limit"),
    ("data.mask", "--mask"),
    ("data.max_length", "--max-length"),
    ("data.max_length", "--length"),
    ("data.overlong", "--overlong"),
    ("data.overlong", "--skip-long"),
    ("data.packing", "--packing"),
    ("data.prompt_template", "--prompt-template"),
    ("data.shots", "--shots"),
    ("data.source", "--data"),
    ("data.split_seed", "--split-seed"),
    ("data.strategy", "--strategy"),
    ("data.strip_annotations", "--strip-annotations"),
    ("data.tokenizer", "--tokenizer"),
    ("data.validation", "--validation"),
    ("data.vocabulary", "--vocabulary"),
    ("data.workers", "--workers"),
    ("loss.chunk_tokens", "--loss-chunk"),
    ("loss.head", "--loss"),
    ("method", "--method"),
    ("mlp.level", "--mlp"),
    ("model.dtype", "--dtype"),
    ("model.name", "--model"),
    ("model.offline", "--offline"),
    ("model.revision", "--revision"),
    ("model.shape.dropout", "--dropout"),
    ("model.shape.family", "--model"),
    ("model.shape.heads", "--heads"),
    ("model.shape.layers", "--layers"),
    ("model.shape.width", "--width"),
    ("offload", "--offload"),
    ("offload.method", "--offload-method"),
    ("offload.resident", "--resident"),
    ("offload.ring", "--ring"),
    ("offload.tier", "--offload"),
    ("optimizer.clip", "--clip"),
    ("optimizer.lr", "--lr"),
    ("optimizer.master_weights", "--master-weights"),
    ("optimizer.place", "--optimizer-on"),
    ("optimizer.replicas", "--replicas"),
    ("optimizer.rule", "--optimizer"),
    ("optimizer.schedule", "--schedule"),
    ("optimizer.warmup", "--warmup"),
    ("optimizer.weight_decay", "--weight-decay"),
    ("optimizer.zero_stage", "--zero-stage"),
    ("precision.compute", "--precision"),
    ("training.accumulation", "--accumulation"),
    ("training.baseline", "--no-baseline"),
    ("training.batch", "--batch-size"),
    ("training.budget", "--budget"),
    ("training.checkpoint_every", "--checkpoint-every"),
    ("training.device", "--device"),
    ("training.epochs", "--epochs"),
    ("training.evaluate_every", "--evaluate-every"),
    ("training.ignore_failed_checkpoints", "--ignore-failed-checkpoints"),
    ("training.keep", "--keep"),
    ("training.log_every", "--log-every"),
    ("training.patience", "--patience"),
    ("training.samples", "--samples"),
    ("training.seed", "--seed"),
    ("training.micro_batch_size", "--micro-batch-size"),
    ("training.steps", "--steps"),
];

/// The flags that set a key.
pub(crate) fn flags_of(key: &str) -> impl Iterator<Item = &'static str> {
    FLAGS.iter().filter(move |(of, _)| *of == key).map(|(_, flag)| *flag)
}

/// The key that a flag of a training sets.
pub(crate) fn key_of(flag: &str) -> Option<&'static str> {
    FLAGS.iter().find(|(_, own)| *own == flag).map(|(key, _)| *key)
}

/// Overrules a value where a flag was given.
pub(crate) fn put<T>(value: &mut T, flag: Option<T>) {
    if let Some(flag) = flag {
        *value = flag;
    }
}

/// Overrules a value that may be absent where a flag was given.
pub(crate) fn put_some<T>(value: &mut Option<T>, flag: Option<T>) {
    if flag.is_some() {
        *value = flag;
    }
}

/// The keys that a flag of trainings sets.
#[cfg(test)]
pub(crate) fn keys_of(flag: &str) -> Vec<&'static str> {
    FLAGS.iter().filter(|(_, own)| *own == flag).map(|(key, _)| *key).collect()
}

/// Puts the flag behind each key that an error about a configuration names.
pub(crate) fn named(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(frugal::Error::Value { .. } | frugal::Error::Conflict { .. } | frugal::Error::Adapter(_)) => {
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
        // Errors about an adapter name its keys without their section.
        if let Some(flag) = flags_of(key).chain(flags_of(&format!("adapter.{key}"))).next() {
            text += &format!(" ({})", format!("{flag} {}", value.trim_matches('"')).trim_end());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_their_flags_behind_them() {
        assert_eq!(with_flags("`training.steps` is 0"), "`training.steps` (--steps) is 0");
        assert_eq!(with_flags("`lora_dropout` is 7"), "`lora_dropout` (--dropout) is 7");
        assert_eq!(
            with_flags("`offload.tier = \"file\"` and `model.freeze`; use `offload`"),
            "`offload.tier = \"file\"` (--offload file) and `model.freeze`; use `offload` (--offload)"
        );
    }

    /// Every flag of the table is one of a training.
    #[test]
    fn flags_exist() {
        use clap::CommandFactory;
        let command = crate::Cli::command();
        let own = |name: &str| command.find_subcommand(name).unwrap().get_arguments();
        let all = own("train").chain(own("finetune")).chain(command.get_arguments());
        let known: Vec<String> =
            all.filter_map(|argument| Some(format!("--{}", argument.get_long()?))).collect();
        for (key, flag) in FLAGS {
            assert!(known.iter().any(|one| one == flag), "{key}: {flag}");
        }
    }
}
