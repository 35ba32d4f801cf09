//! Checks before a weight is read: values outside their ranges, and techniques that ranks or a model do not allow.

use kernels::nf4::Scales;
use models::DecoderConfig;
use models::hugging_face::Folder;
use tch::{Device, Kind};

use crate::config::{
    ActivationPlan, Compute, Config, Dtype, ObjectiveKind, OffloadMethod, OffloadTier, OptimizerPlace,
    OptimizerRule, ZeroStage, nearest_name,
};
use crate::error::{Error, Result};
use crate::recipe::pairs::{self, KEPT_CASTS, RECOMPUTE, kept_by};

/// Passes over the data whose batches can be counted one by one.
const MAX_EPOCHS: u64 = 1_000_000;
/// Rows of a batch, and batches of a step, that can be gathered.
const MAX_BATCH: u64 = 1 << 20;
/// Threads that make batches.
const MAX_WORKERS: u64 = 256;
/// Names of checkpoint levels.
const LEVELS: [&str; 5] = ["save-all", "save-gate-up", "save-one", "input-only", "input-only-tiled:16MiB"];

/// Checks each value by itself.
pub(super) fn values(config: &Config) -> Result<()> {
    let Config { training, optimizer, data, activations, .. } = config;
    // Counts that must not be 0.
    let counts: [(&'static str, Option<u64>); 17] = [
        ("objective.teacher_top_k", config.objective.teacher_top_k.map(|k| k as u64)),
        ("training.steps", training.steps),
        ("training.epochs", training.epochs),
        ("training.batch", Some(training.batch as u64)),
        ("training.accumulation", Some(training.accumulation as u64)),
        ("training.micro_batch_size", training.micro_batch_size.map(|rows| rows as u64)),
        ("training.sequence_parallel_size", Some(training.sequence_parallel_size as u64)),
        ("training.checkpoint_every", training.checkpoint_every.steps()),
        ("training.evaluate_every", training.evaluate_every),
        ("training.patience", training.patience),
        ("training.log_every", Some(training.log_every)),
        ("training.keep", Some(training.keep as u64)),
        ("data.limit", data.limit.map(|rows| rows as u64)),
        ("data.max_length", data.max_length.map(|tokens| tokens as u64)),
        ("data.packing", data.packing.map(|positions| positions as u64)),
        ("activations.every", Some(activations.every as u64)),
        ("offload.ring", config.offload.as_ref().map(|offload| offload.ring as u64)),
    ];
    for (key, value) in counts {
        if value == Some(0) {
            return Err(Error::Value { key, found: "0".to_owned(), expected: "1 or more" });
        }
    }
    // Largest values that memory or indices permit.
    let bounds = [
        ("training.epochs", training.epochs, MAX_EPOCHS, "1 to 1000000"),
        ("training.batch", Some(training.batch as u64), MAX_BATCH, "1 to 1048576"),
        ("training.accumulation", Some(training.accumulation as u64), MAX_BATCH, "1 to 1048576"),
        ("data.workers", Some(data.workers as u64), MAX_WORKERS, "0 to 256"),
    ];
    for (key, value, most, expected) in bounds {
        if let Some(value) = value.filter(|value| *value > most) {
            return Err(Error::Value { key, found: value.to_string(), expected });
        }
    }
    // Real numbers.
    let ranges: [(&'static str, f64, &'static str); 4] = [
        ("optimizer.lr", optimizer.lr, "a finite number, 0 or more"),
        ("optimizer.warmup", optimizer.warmup, "a share of the steps below 1, or a number of steps"),
        ("optimizer.weight_decay", optimizer.weight_decay, "a finite number, 0 or more"),
        ("optimizer.clip", optimizer.clip, "a maximum norm above 0, or 0 for no clipping"),
    ];
    for (key, value, expected) in ranges {
        if !(value.is_finite() && value >= 0.0) {
            return Err(Error::Value { key, found: value.to_string(), expected });
        }
    }
    if !(0.0..=0.5).contains(&data.held_out) {
        let expected = "a share from 0 to 0.5 of the rows";
        return Err(Error::Value { key: "data.held_out", found: data.held_out.to_string(), expected });
    }
    if let (Some(patience), None) = (training.patience, training.evaluate_every) {
        let expected = "`training.evaluate_every` with it: patience counts evaluations";
        return Err(Error::Value { key: "training.patience", found: patience.to_string(), expected });
    }
    if optimizer.replicas == 0 {
        return Err(Error::Value { key: "optimizer.replicas", found: "0".to_owned(), expected: "1 or more" });
    }
    if let Some(tokens) = config.loss.chunk_tokens.filter(|tokens| *tokens < 1) {
        return Err(Error::Value {
            key: "loss.chunk_tokens",
            found: tokens.to_string(),
            expected: "1 or more",
        });
    }
    if let Some(coefficient) =
        config.loss.router_aux_loss.filter(|value| !(value.is_finite() && *value >= 0.0))
    {
        return Err(Error::Value {
            key: "loss.router_aux_loss",
            found: coefficient.to_string(),
            expected: "a coefficient of 0 or more",
        });
    }
    if let Some(alpha) = training.neftune_noise_alpha.filter(|alpha| !(alpha.is_finite() && *alpha >= 0.0)) {
        let (key, expected) = ("training.neftune_noise_alpha", "0 or more, such as 5");
        return Err(Error::Value { key, found: alpha.to_string(), expected });
    }
    config.objective.preference()?;
    let own = &config.objective;
    let has_files = own.teacher_top_k.is_some() && own.teacher_files.is_some();
    if own.distillation()?.is_some() && own.teacher.is_none() && !has_files {
        return Err(Error::Value {
            key: "objective.teacher",
            found: "absent".to_owned(),
            expected: "the teacher of `objective.kind = \"distillation\"`: a folder, a GGUF file or a name on the hub",
        });
    }
    // Values that the techniques' crates check themselves.
    if let Some(level) = &config.mlp.level {
        let parsed: Result<swiglu_ckpt::CheckpointLevel, _> = level.parse();
        parsed.map_err(|error| match nearest_name(level, LEVELS.into_iter()) {
            Some(name) => Error::Toml(format!("`mlp.level`: {error}; did you mean `{name}`?")),
            None => error.into(),
        })?;
    }
    if let Some(adapter) = &config.adapter {
        adapter.check()?;
        let patterns = adapter.alpha_pattern.values().filter_map(serde_json::Value::as_f64);
        if let Some(alpha) = std::iter::once(adapter.lora_alpha).chain(patterns).find(|alpha| *alpha <= 0.0) {
            let key =
                if alpha == adapter.lora_alpha { "adapter.lora_alpha" } else { "adapter.alpha_pattern" };
            let expected = "a number above 0: the adapter's product is scaled by α/r";
            return Err(Error::Value { key, found: alpha.to_string(), expected });
        }
    }
    Ok(())
}

/// Returns the stages that the techniques allow over several ranks, whose groups are for tensors on `device`: one at least.
pub(crate) fn stages(config: &Config, ranks: usize, device: Device) -> Result<Vec<ZeroStage>> {
    let given = config.optimizer.zero_stage;
    let stages = if given == ZeroStage::Auto { &ZeroStage::ALL[..] } else { &[given] };
    let (mut allowed, mut refusal) = (Vec::new(), None);
    for &stage in stages {
        match stage_over_ranks(config, stage, ranks, device) {
            Ok(()) => allowed.push(stage),
            // Of layers that are offloaded only the last refusal is not that of the others.
            Err(error) if refusal.is_none() || config.offload.is_some() => refusal = Some(error),
            Err(_) => {}
        }
    }
    match (allowed.is_empty(), refusal) {
        (true, Some(error)) => Err(error),
        _ => Ok(allowed),
    }
}

/// Checks the techniques against a stage over several ranks.
fn stage_over_ranks(config: &Config, stage: ZeroStage, ranks: usize, device: Device) -> Result<()> {
    let refused = |first: &str, why, remedy| {
        Err(Error::Conflict { first: first.to_owned(), second: format!("{ranks} ranks"), why, remedy })
    };
    let Config { offload, optimizer, .. } = config;
    let rule = optimizer.rule;
    if rule.updates_whole_tensors() {
        let why = "the update of a weight depends on all others of its tensor, which ranks divide";
        let remedy = "use `optimizer.rule = \"adamw\"`, \"adamw8bit\" or \"lion\", or train in one process";
        return refused(&format!("`optimizer.rule = \"{rule}\"`"), why, remedy);
    }
    if stage == ZeroStage::Three && rule == OptimizerRule::AdamW8bit {
        let why = "layers are divided within the blocks of 256 numbers that share a scale";
        let remedy = "use `optimizer.zero_stage = 2`, or `optimizer.rule = \"lion\"` or \"adamw\"";
        return refused("`optimizer.rule = \"adamw8bit\"` with `optimizer.zero_stage = 3`", why, remedy);
    }
    if optimizer.in_backward {
        let why = "ranks update their parts of weights after gradients are reduced";
        return refused(
            "`optimizer.in_backward`",
            why,
            "use `optimizer.zero_stage = 2`, which divides gradients, and leave it out",
        );
    }
    if stage == ZeroStage::Three && config.objective.kind == ObjectiveKind::Grpo {
        let why = "answers take different numbers of passes, and all ranks gather a layer in the same pass";
        return refused(
            "`objective.kind = \"grpo\"` with `optimizer.zero_stage = 3`",
            why,
            "use `optimizer.zero_stage = 2`",
        );
    }
    if config.experts.is_some() {
        let why =
            "each rank would read the experts of its own tokens from the same disk, which has never run";
        return refused("`experts`", why, "leave `experts` out, or train in one process");
    }
    if stage < ZeroStage::Three && offload.is_some() {
        let why = "offloaded layers get their memory from the ring, and the ranks' optimizer theirs from its buckets";
        return refused("`offload`", why, "use `optimizer.zero_stage = 3`, or leave `offload` out");
    }
    let in_files = offload.as_ref().is_some_and(|offload| offload.tier == OffloadTier::File);
    if optimizer.place == OptimizerPlace::Host && !in_files {
        let why = "the ranks' own optimizer steps the shards, where they are";
        let remedy = "use `optimizer.place = \"device\"`, or `offload.tier = \"file\"`, where the shards and their state are in files";
        return refused("`optimizer.place = \"host\"`", why, remedy);
    }
    if offload.as_ref().is_some_and(|offload| offload.method != OffloadMethod::Overlap) {
        let why = "layers are gathered into the ring's slots";
        return refused("`offload.method`", why, "use `offload.method = \"overlap\"`");
    }
    if in_files && device != Device::Cpu {
        let why = "shards of ranks on GPUs are in the GPU's memory";
        return refused(
            "`offload.tier = \"file\"`",
            why,
            "use `offload.tier = \"host\"`, or leave `offload` out",
        );
    }
    if stage == ZeroStage::Three && (!config.keeps_whole_layers() || config.keeps_inputs_on_host()) {
        let why = "a divided layer keeps all its activations, or its input alone";
        let remedy = "use `activations.plan = \"keep\"`, \"every-k\" or \"recompute\" with `activations.recompute = \"layer\"`, or \
                      `optimizer.zero_stage = 2`";
        return refused("`activations`", why, remedy);
    }
    if stage == ZeroStage::Three && config.keeps_casts() {
        return refused(&format!("{} in mixed precision", kept_by(config)), KEPT_CASTS, RECOMPUTE);
    }
    if stage == ZeroStage::Three && pairs::is_quantized(config) {
        let why = "layers that are divided are placeholders of NaN between their uses, which bytes of quantized weights do not have";
        let remedy = "use `optimizer.zero_stage = 2`, where each rank has the whole base";
        return refused(&pairs::quantized(config), why, remedy);
    }
    if device == Device::Cpu && !["auto", "cpu"].contains(&&*config.training.device) {
        let why = "ranks are connected over CPUs; groups over NCCL have never run on a GPU";
        let remedy = "use `training.device = \"cpu\"`, or one process; with FRUGAL_TRY_NCCL=1 in the environment, `frugal launch` tries it";
        return refused("`training.device`", why, remedy);
    }
    if !ranks.is_multiple_of(optimizer.replicas) {
        let given = format!("{} with {ranks} ranks", optimizer.replicas);
        let expected = "a number that divides the number of ranks";
        return Err(Error::Value { key: "optimizer.replicas", found: given, expected });
    }
    sequence_parallel(config, ranks)?;
    let parts = config.training.sequence_parallel_size;
    if config.training.accumulation < ranks / parts {
        let expected = match parts {
            1 => {
                "at least one batch for each rank: a step's batches are divided among the ranks; give --accumulation"
            }
            _ => "at least one batch for each group of ranks that divide a row; give --accumulation",
        };
        let found = format!("{} with {ranks} ranks", config.training.accumulation);
        return Err(Error::Value { key: "training.accumulation", found, expected });
    }
    Ok(())
}

/// Checks the techniques against rows that are divided among ranks.
fn sequence_parallel(config: &Config, ranks: usize) -> Result<()> {
    let parts = config.training.sequence_parallel_size;
    if parts == 1 {
        return Ok(());
    }
    if !ranks.is_multiple_of(parts) {
        let found = format!("{parts} with {ranks} ranks");
        let expected = "a number that divides the number of ranks";
        return Err(Error::Value { key: "training.sequence_parallel_size", found, expected });
    }
    if config.loss.router_aux_loss.is_some_and(|coefficient| coefficient > 0.0) {
        return Err(Error::Conflict {
            first: "`loss.router_aux_loss`".to_owned(),
            second: format!("`training.sequence_parallel_size = {parts}`"),
            why: "the loss is a product of sums over all tokens of a batch, and a rank knows those of its part",
            remedy: "leave `loss.router_aux_loss` out, or let each rank take whole rows",
        });
    }
    if config.objective.kind.is_preference() || config.objective.kind == ObjectiveKind::Grpo {
        return Err(Error::Conflict {
            first: format!("`objective.kind = \"{}\"`", config.objective.kind.name()),
            second: format!("`training.sequence_parallel_size = {parts}`"),
            why: "the log-probability of an answer is a sum over the whole row, and a rank has that of its part",
            remedy: "let each rank take whole rows",
        });
    }
    if config.objective.kind == ObjectiveKind::Distillation {
        return Err(Error::Conflict {
            first: "`objective.kind = \"distillation\"`".to_owned(),
            second: format!("`training.sequence_parallel_size = {parts}`"),
            why: "the teacher reads whole rows, and a rank has a part of each",
            remedy: "let each rank take whole rows",
        });
    }
    if config.activations.plan == ActivationPlan::Plan {
        return Err(Error::Conflict {
            first: "`activations.plan = \"plan\"`".to_owned(),
            second: format!("`training.sequence_parallel_size = {parts}`"),
            why: "each rank would choose its own plan by its own measurements, and recomputed attention needs all of them",
            remedy: "use `activations.plan = \"keep\"`, \"every-k\" or \"recompute\"",
        });
    }
    Ok(())
}

/// Checks the model against rows that are divided among ranks.
pub(super) fn sequence_parallel_model(config: &Config, model: &DecoderConfig) -> Result<()> {
    let parts = config.training.sequence_parallel_size as i64;
    if parts == 1 {
        return Ok(());
    }
    if model.num_attention_heads % parts != 0 {
        return Err(Error::Value {
            key: "training.sequence_parallel_size",
            found: format!("{parts} for a model with {} attention heads", model.num_attention_heads),
            expected: "a number that divides the heads: each rank attends with some of them",
        });
    }
    if model.linear_layers() > 0 {
        return Err(Error::Conflict {
            first: format!("`training.sequence_parallel_size = {parts}`"),
            second: "a model with linear attention".to_owned(),
            why: "its layers read the tokens of a row one after the other, which ranks with parts of it cannot",
            remedy: "let each rank take whole rows",
        });
    }
    Ok(())
}

/// Returns the configuration with the dtype of files that are in NF4, unless it has one.
pub(super) fn with_dtype_of(config: &Config, folder: &Folder) -> Config {
    let mut config = config.clone();
    if folder.kind().is_ok_and(|kind| Scales::of(kind).is_some()) {
        config.model.dtype.get_or_insert(Dtype::Nf4);
    }
    config
}

/// Checks the techniques against the model's configuration and the dtype of its files.
pub(super) fn folder(config: &Config, folder: &Folder) -> Result<()> {
    let model = folder.config();
    if let Some(adapter) = &config.adapter {
        adapter.check_matches(model)?;
        adapter.trainable_parameters(model)?;
        adapter.check_tying(model)?;
    }
    if let Some(coefficient) = config.loss.router_aux_loss.filter(|_| model.mixture_layers() == 0) {
        let (key, found) = ("loss.router_aux_loss", coefficient.to_string());
        return Err(Error::Value {
            key,
            found,
            expected: "nothing: the model has no router, whose choices it balances",
        });
    }
    if let Some(experts) = config.experts.as_ref().filter(|_| model.mixture_layers() == 0) {
        let (key, found) = ("experts.cache", experts.cache.to_string());
        return Err(Error::Value { key, found, expected: "nothing: the model has no mixture of experts" });
    }
    if let Some(offload) = &config.offload {
        let layers = usize::try_from(model.num_hidden_layers).unwrap_or(0);
        let kept = offload.keep.as_deref().unwrap_or_default();
        for (key, numbers) in [("offload.resident", &offload.resident[..]), ("offload.keep", kept)] {
            if let Some(layer) = numbers.iter().find(|layer| **layer >= layers) {
                let expected = "numbers of layers that the model has, from 0";
                return Err(Error::Value { key, found: layer.to_string(), expected });
            }
        }
    }
    sequence_parallel_model(config, model)?;
    pairs::check(&with_dtype_of(config, folder))?;
    let is_half = config.model.dtype.is_none() && folder.kind().is_ok_and(|kind| kind == Kind::Half);
    if is_half && config.adapter.is_none() && config.precision.compute == Compute::Fp16 {
        let dtype = Some(Dtype::Float16);
        let model = crate::config::ModelConfig { dtype, ..config.model.clone() };
        return pairs::check(&Config { model, ..config.clone() });
    }
    Ok(())
}
