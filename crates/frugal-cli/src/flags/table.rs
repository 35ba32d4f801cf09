//! The table of flags: one row for each flag that overrides a key of a configuration.
//!
//! A row is a key, the flag with its other names, the value that it takes, and its help. Names behind `|` are accepted, as those of
//! other programs with the same meaning are; names behind `~` are not, and an error about one names the flag. What a command's help,
//! manual page and completions say, what overrides its configuration, what `config.toml` gives as a value's origin, and the flags that
//! errors name beside keys all come from here.

use clap::Arg;
use frugal::config::{
    ActivationPlan, CaptureMode, CheckpointEvery, Compute, DataFormat, DivergenceKind, Dtype, LossHeadKind,
    MasterWeights, NewTokenInit, ObjectiveKind, OffloadMethod, OffloadTier, OptimizerPlace, OptimizerRule,
    Recomputed, ReferenceKind, TeacherPlace,
};
use frugal::rows::Overlong;

use super::values::{
    self, MaskArg, MethodArg, ScheduleArg, StepArg, Takes, choice, list, number, path, several, switch, text,
    whole,
};

/// `frugal train`.
pub(crate) const TRAIN: u8 = 1;
/// `frugal finetune`.
pub(crate) const FINETUNE: u8 = 2;
/// `frugal resume`.
pub(crate) const RESUME: u8 = 4;
/// Commands that make rows of data as a fine-tuning does: `frugal data` and `frugal eval`.
pub(crate) const ROWS: u8 = 8;
/// Commands that describe an adapter: `frugal info`.
pub(crate) const ADAPTERS: u8 = 16;
/// Flags of the whole program.
pub(crate) const COMMON: u8 = 32;

/// `frugal plan`.
pub(crate) const PLAN: u8 = 64;

const TRAININGS: u8 = TRAIN | FINETUNE;

/// Keys that decide nothing of a step: `frugal plan` takes their flags, so that those of a training can be given to it, and does not list them.
pub(crate) const OF_NO_STEP: [&str; 16] = [
    "model.new_token_init",
    "training.steps",
    "training.epochs",
    "training.checkpoint_every",
    "training.keep",
    "training.evaluate_every",
    "training.log_every",
    "training.patience",
    "training.baseline",
    "training.samples",
    "optimizer.lr",
    "optimizer.schedule",
    "optimizer.warmup",
    "optimizer.weight_decay",
    "adapter.lora_alpha",
    "adapter.use_rslora",
];

/// A flag that overrides a key of a configuration.
#[derive(Debug)]
pub(crate) struct Flag {
    /// The key with its section; empty for `--config` and `--set`, which name keys themselves, and for `--method`, which several set.
    pub(crate) key: &'static str,
    /// The flag as it is typed.
    pub(crate) name: &'static str,
    /// Other names that are accepted.
    pub(crate) aliases: &'static [&'static str],
    /// Names of other programs that are not accepted.
    pub(crate) others: &'static [&'static str],
    pub(crate) takes: Takes,
    /// Heading in the help of a training.
    pub(crate) section: &'static str,
    /// The commands that have it, as a set of bits.
    pub(crate) commands: u8,
    pub(crate) help: &'static str,
    /// Flags that it needs or excludes.
    pub(crate) relation: fn(Arg) -> Arg,
}

macro_rules! flags {
    ($section:expr, $commands:expr; $(
        $key:literal, $name:literal $(| $alias:literal)* $(~ $other:literal)* => $takes:expr,
            $help:literal $(, $relation:expr)?;
    )*) => {
        &[$(Flag {
            key: $key,
            name: $name,
            aliases: &[$($alias),*],
            others: &[$($other),*],
            takes: $takes,
            section: $section,
            commands: $commands,
            help: $help,
            relation: flags!(@relation $($relation)?),
        }),*]
    };
    (@relation) => { |argument| argument };
    (@relation $relation:expr) => { $relation };
}

/// Returns the rows, in the order of the help.
pub(crate) fn rows() -> impl Iterator<Item = &'static Flag> {
    TABLE.iter().copied().flatten()
}

const COMMON_OPTIONS: &str = "Common options";
const OPTIONS: &str = "";
const DATA: &str = "Data";
const ADAPTER: &str = "Adapter";
const LOOP: &str = "Training";
const MEMORY: &str = "Memory";
const OPTIMIZER: &str = "Precision and optimizer";
const RUN: &str = "Run";

/// A model and its data are in the file or among the assignments if no flag gives them.
const IN_FILE: [&str; 2] = ["config", "set"];

static TABLE: [&[Flag]; 29] = [
    flags! { OPTIONS, FINETUNE;
        "model.name", "--model" ~ "--base-model" ~ "--model-name" ~ "--model-name-or-path" => text("NAME_OR_FOLDER"),
            "A folder in Hugging Face's layout, a GGUF file, a name in Ollama's store (ollama:NAME), a name on the hub, such as Qwen/Qwen2.5-0.5B, or the output folder of a training of all weights",
            |argument| argument.required_unless_present_any(IN_FILE);
        "model.revision", "--revision" => text("REVISION"), "Branch, tag or commit on the hub";
        "model.offline", "--offline" => switch("true"), "Use the hub's cache only, never the network";
        "model.untied", "--untied" => switch("true"), "Of a GGUF file that holds the embedding again as the output head, keep both";
        "model.dtype", "--dtype" => choice::<Dtype>("DTYPE"), "Dtype of the weights [default: that of the files]";
        "", "--method" => choice::<MethodArg>("METHOD"), "What is trained [default: lora]";
    },
    flags! { OPTIONS, FINETUNE | PLAN;
        "model.new_tokens", "--new-tokens" => Takes::One { name: "FILE", parser: values::new_tokens },
            "Tokens to add: one a line, or a JSON list of texts and objects such as {\"token\": \"<|call|>\", \"special\": true, \"from\": \"call\"}; an adapter trains their rows of the embedding and of the head alone";
        "model.new_token_init", "--new-token-init" => choice::<NewTokenInit>("INIT"),
            "First values of their rows: the mean of all rows, or of those of a token's pieces [default: mean]";
        "model.pad_vocabulary_to", "--pad-vocabulary-to" ~ "--pad-to-multiple-of" => Takes::One { name: "ROWS", parser: values::least::<1> },
            "Make a vocabulary that new tokens enlarge a multiple of this many rows [default: a row for each token]";
    },
    flags! { OPTIONS, PLAN;
        "", "--method" => choice::<StepArg>("METHOD"), "What a step computes [default: lora]";
        "model.dtype", "--dtype" => choice::<Dtype>("DTYPE"),
            "Dtype of the weights: float32, bfloat16, nf4, or gguf for the blocks of a GGUF file [default: that of the files in the folder --model; without one bfloat16, and float32 where all weights are trained]";
        "data.max_length", "--length" | "--max-length" | "--tokens" | "--sequence" | "--max-seq-length" | "--max-seq-len" => Takes::One { name: "LENGTH", parser: values::least::<1> },
            "Tokens of a row, as finetune's --max-length [default: 512, or the model's context if that is shorter]";
        "training.batch", "--batch-size" | "--batch" | "--per-device-train-batch-size" => Takes::One { name: "BATCH_SIZE", parser: values::size },
            "Rows per batch [default: 4, as finetune; 1 in inference and over several ranks]";
        "training.budget", "--budget" => Takes::One { name: "BYTES", parser: values::bytes },
            "Memory limit of the device, such as 10GiB; on a CPU, of the whole process [default: 80 % of the free memory; of all memory of --hardware]";
        "adapter.target_modules", "--targets" | "--target-modules" | "--lora-targets" => list("NAMES", values::parsed::<String>, values::short_targets),
            "Projections to adapt: names or their last parts, separated by commas, or all-linear; q, k, v, o, gate, up, down and all for short [default: q_proj,k_proj,v_proj,o_proj]";
    },
    flags! { DATA, FINETUNE;
        "data.source", "--data" ~ "--dataset" ~ "--dataset-name" => text("PATH"),
            "Training data: a file of records (.jsonl, .json, .csv, .tsv, .parquet, all but the last also .gz and .zst) with messages, prompts and completions, instructions, questions and answers, texts or token ids; a text file; or a folder with train.* (and validation.* if there is one) or with shards of any names; or a quoted pattern such as 'shards/*.jsonl'",
            |argument| argument.required_unless_present_any(["config", "set", "questions", "mixture"]);
        "data.mixture", "--mixture" => several("PATH=WEIGHT"),
            "A source of a mixture with its weight, in the place of --data; may be given several times: --mixture chat.jsonl=0.7 --mixture code.jsonl=0.3 takes 70 % of the rows from the first";
        "data.source", "--questions" => text("PATH"),
            "Questions for --objective grpo: a file of records with `question`, and `answer` unless a program grades",
            |argument| argument.conflicts_with("data");
        "data.validation", "--validation" => path("FILE"),
            "Validation data: a file; a folder may have its own split, and GSM8K has one [default: the folder's validation.*]";
    },
    flags! { DATA, FINETUNE | ROWS;
        "data.format", "--format" => choice::<DataFormat>("FORMAT"),
            "Format of the data [default: detected from file names and the first 100 records]";
        "data.field", "--field" => text("FIELD"), "Field of a record that holds its text [default: text]";
        "data.prompt_template", "--prompt-template" => text("TEXT"),
            "The prompt of a record, with its fields in braces: 'Question: {query}'; a user's message if the model has a chat template",
            |argument| argument.requires("completion-template");
        "data.completion_template", "--completion-template" => text("TEXT"),
            "The answer of a record, which counts in the loss, with its fields in braces: '{response}'",
            |argument| argument.requires("prompt-template").conflicts_with("format");
        "data.mask", "--mask" => choice::<MaskArg>("MASK"),
            "Which tokens of a conversation, or of a prompt with its completion, count in the loss [default: answers]";
        "data.overlong", "--overlong" => choice::<Overlong>("ACTION"),
            "What happens to a row that is longer than --max-length [default: error]",
            |argument| argument.conflicts_with("skip-long");
        "data.chat_template", "--chat-template" => path("FILE"),
            "A Jinja file with the chat template [default: the model's own]";
        "data.end_token", "--end-token" => text("TOKEN"),
            "Text of the token that ends an answer [default: the model's eos_token_id]";
        "data.overlong", "--skip-long" => switch("\"skip\""),
            "Short for --overlong skip: leave out rows that are longer than --max-length";
        "data.max_length", "--max-length" | "--max-seq-length" | "--max-seq-len" => whole("TOKENS"),
            "Maximum length of a row in tokens [default: the model's context]";
    },
    flags! { DATA, FINETUNE;
        "data.shots", "--shots" => whole("SHOTS"), "Solved examples before each question (GSM8K) [default: 0]";
        "data.strip_annotations", "--strip-annotations" => switch("true"),
            "Remove calculator annotations (<<6*7=42>>) from answers (GSM8K)";
        "data.split_seed", "--split-seed" => whole("SPLIT_SEED"),
            "Seed of the split into 90, 5 and 5 % and of the choice of solved examples (GSM8K) [default: 42]";
        "data.limit", "--limit" => whole("N"), "Train on the first N rows";
    },
    flags! { DATA, TRAIN;
        "data.source", "--data" => text("synthetic|embedded|PATH"),
            "Training data: `synthetic` (a generated language), `embedded` (the encyclopedia in data/), or a PATH: a text file in WikiText's format, a .jsonl file, the folder of a token store [default: synthetic]";
        "data.validation", "--validation" => path("PATH"),
            "Validation data, as for --data [default: the embedded validation set for embedded data]";
        "data.field", "--field" => text("FIELD"),
            "Field of a .jsonl file's objects that holds the text [default: text]";
        "data.tokenizer", "--tokenizer" => path("FILE"),
            "A tokenizer.json [default: the embedded one for embedded data, else one that is trained on the data]";
        "data.vocabulary", "--vocabulary" => Takes::One { name: "VOCABULARY", parser: values::least::<1> },
            "Vocabulary size [default: the tokenizer's; 128 for the synthetic language; at most 4096 for a tokenizer that is trained on the data]";
        "data.strategy", "--strategy" => text("STRATEGY"),
            "Batching: base (pads to --length), standard (pads to the batch's longest document), balanced:K (the same, with lengths that differ by at most K), sequenced (concatenates a batch's documents), packed (best fit into rows) [default: packed]";
        "data.max_length", "--length" ~ "--max-seq-length" => Takes::One { name: "LENGTH", parser: values::least::<2> },
            "Tokens of a row, and of the longest document [default: 32]";
        "data.workers", "--workers" => whole("WORKERS"),
            "Threads that make batches; 0 makes them in the training thread [default: 1]";
    },
    flags! { DATA, TRAININGS;
        "data.packing", "--packing" => whole("TOKENS"),
            "Pack several rows into one of TOKENS positions, without attention between them [default without a value: 1024]",
            |argument| argument.num_args(0..=1).default_missing_value("1024");
    },
    flags! { DATA, FINETUNE;
        "data.padding_free", "--padded" => switch("false"),
            "Pad the rows of a batch to the longest, instead of laying them end to end without attention between them";
    },
    flags! { ADAPTER, FINETUNE | ADAPTERS | PLAN;
        "adapter.r", "--r" | "--rank" | "--lora-r" | "--lora-rank" => Takes::One { name: "R", parser: values::parsed::<i64> }, "Rank [default: 8]";
        "adapter.lora_alpha", "--alpha" | "--lora-alpha" => number("ALPHA"),
            "α: the adapter's product is scaled by α/r [default: 16]";
        "adapter.lora_dropout", "--dropout" | "--lora-dropout" => number("DROPOUT"),
            "Dropout probability of an adapter's input [default: 0.05]";
    },
    flags! { ADAPTER, FINETUNE | ADAPTERS;
        "adapter.target_modules", "--targets" | "--target-modules" => list("NAMES", values::parsed::<String>, values::targets),
            "Projections to adapt: names or their last parts, separated by commas, all-linear or none; the default also names those that a model calls otherwise, as of linear attention [default: q_proj,k_proj,v_proj,o_proj]";
    },
    flags! { ADAPTER, FINETUNE | ADAPTERS | PLAN;
        "adapter.target_modules", "--target-pattern" => text("REGEX"),
            "Projections to adapt: a regular expression that matches the whole name",
            |argument| argument.conflicts_with("targets");
        "adapter.target_parameters", "--target-parameters" => list("NAMES", values::parsed::<String>, values::array),
            "Tensors of a mixture's experts to adapt besides the projections, without dropout: gate_up_proj, down_proj; with --targets none these alone";
        "adapter.use_rslora", "--rslora" | "--use-rslora" => switch("true"), "Scale by α/√r (rsLoRA)";
        "adapter.use_dora", "--dora" | "--use-dora" => switch("true"),
            "Learn the magnitude of each row of the weights separately (DoRA)";
        "adapter.init_lora_weights", "--init" | "--init-lora-weights" => Takes::One { name: "INIT", parser: values::initialization },
            "How adapters are initialised: true, false, gaussian, pissa, olora or orthogonal [default: true]";
    },
    flags! { LOOP, TRAININGS;
        "", "--config" => path("FILE"), "Read every setting from a TOML file; flags override it";
    },
    flags! { LOOP, FINETUNE | PLAN;
        "objective.kind", "--objective" ~ "--loss-type" ~ "--pref-loss" => choice::<ObjectiveKind>("OBJECTIVE"),
            "What is learned: each next token, from pairs of a chosen and a rejected answer or from rated ones which are better, to get rewards for the model's own answers, or a teacher's distributions [default: next-token]";
        "objective.beta", "--beta" ~ "--pref-beta" => number("BETA"),
            "β of dpo, ipo, simpo, cpo, kto and grpo, λ of orpo: how much the model may change for it; the teacher's share of jensen-shannon [default: 0.1; for simpo: 2; for grpo: 0; for jensen-shannon: 0.5]";
        "objective.reference", "--reference" => choice::<ReferenceKind>("REFERENCE"),
            "Where dpo, ipo and kto take the log-probabilities of the model at the start from [default: auto]";
    },
    flags! { LOOP, FINETUNE;
        "objective.reference_model", "--reference-model" ~ "--ref-model" => text("MODEL"),
            "Another model that dpo, ipo and kto compare with, with the same tokenizer: a folder, a GGUF file, a name in Ollama's store, or a name on the hub; it is read before the first step and then not held [default: the model at the start]";
        "objective.teacher", "--teacher" | "--teacher-model" ~ "--teacher-model-name-or-path" => text("MODEL"),
            "The teacher of distillation, a model with the same tokenizer: a folder, a GGUF file, a name in Ollama's store, or a name on the hub";
        "objective.teacher_dtype", "--teacher-dtype" => choice::<Dtype>("DTYPE"),
            "Dtype of the teacher's weights [default: that of its files; of a GGUF file its blocks]";
        "objective.teacher_place", "--teacher-place" => choice::<TeacherPlace>("PLACE"),
            "Where the teacher's layers are: auto offloads them where the budget has no room [default: auto]";
        "objective.teacher_top_k", "--teacher-top-k" => whole("TOKENS"),
            "Ask the teacher once, before the first step, for this many of its most probable tokens at each label; it then takes no memory in the training";
        "objective.teacher_files", "--teacher-files" => path("FOLDER"),
            "Folder with what --teacher-top-k asks for, which other trainings on the same rows use without the teacher [default: one in --out]";
        "objective.divergence", "--divergence" => choice::<DivergenceKind>("DIVERGENCE"),
            "How distillation compares the student with its teacher [default: forward-kl]";
        "objective.temperature", "--distillation-temperature" => number("TEMPERATURE"),
            "Temperature of both distributions of distillation [default: 1]";
        "objective.label_weight", "--label-weight" => number("WEIGHT"),
            "Share of the labels in the loss of distillation, from 0, the teacher alone, to 1 [default: 0]";
        "rollout.grader", "--grader" => text("GRADER"),
            "What rewards the answers of grpo: number, exact, contains or regex compare them with the question's, and a program (./grade.py) reads them as JSON lines and writes a number for each";
        "rollout.samples", "--group-size" | "--num-generations" => whole("ANSWERS"), "Answers to each question of grpo [default: 8]";
        "rollout.max_new_tokens", "--max-new-tokens" ~ "--max-completion-length" => whole("TOKENS"),
            "Maximum tokens of an answer of grpo [default: 256]";
    },
    flags! { LOOP, TRAININGS | PLAN;
        "training.steps", "--steps" | "--max-steps" => whole("STEPS"),
            "Optimizer steps; if --epochs is given too, training ends at whichever comes first [default: those of --epochs; for train: 100]";
        "training.epochs", "--epochs" | "--num-train-epochs" ~ "--num-epochs" => whole("EPOCHS"),
            "Passes over the data [default: 1, or as many as --steps needs]";
    },
    flags! { LOOP, TRAININGS;
        "training.batch", "--batch-size" | "--batch" | "--per-device-train-batch-size" => whole("BATCH_SIZE"),
            "Rows per batch; pairs of an objective over pairs, answers of kto and grpo [default: 4; for train: 8]";
    },
    flags! { LOOP, TRAININGS | PLAN;
        "training.accumulation", "--accumulation" | "--gradient-accumulation-steps" ~ "--gradient-accumulation" ~ "--grad-accum" => whole("ACCUMULATION"),
            "Gradient accumulation steps: batches per optimizer step [default: 4; for train: 1]";
        "training.checkpoint_every", "--checkpoint-every" ~ "--save-steps" => Takes::One { name: "STEPS_OR_TIME", parser: values::parsed::<CheckpointEvery> },
            "Steps (500) or time (10m, 600s, 2h) between checkpoints, besides those at the end and on Ctrl-C [default: 10m]";
        "training.keep", "--keep" => whole("KEEP"), "Checkpoints to keep [default: 2; for train: 3]";
        "training.evaluate_every", "--evaluate-every" ~ "--eval-steps" => whole("STEPS"),
            "Steps between evaluations on the validation data; finetune makes one at the end in any case";
        "training.log_every", "--log-every" | "--read-every" ~ "--logging-steps" => whole("STEPS"),
            "Steps between reads of the loss, which wait for the device [default: 1; for train: 10]";
    },
    flags! { LOOP, TRAININGS;
        "training.neftune_noise_alpha", "--neftune-noise-alpha" | "--neftune-alpha" => number("ALPHA"),
            "Add noise to the embeddings in training, uniform in ±ALPHA/√(L·d) for an example of L tokens: 5 to 15 in the publication (NEFTune) [default: 0]";
        "training.capture", "--capture" => choice::<CaptureMode>("MODE"),
            "Whether a CUDA graph repeats the steps, so that the host does not launch each kernel [default: auto]";
    },
    flags! { MEMORY, TRAININGS | PLAN;
        "training.micro_batch_size", "--micro-batch-size" | "--rows-at-once" => whole("ROWS"),
            "Rows per forward and backward; the gradients of a batch are summed [default: the batch, or fewer if the budget needs that]";
    },
    flags! { MEMORY, TRAININGS;
        "training.budget", "--budget" => Takes::One { name: "BYTES", parser: values::bytes },
            "Memory limit, such as 3GiB: of the process on a CPU, of tensors on a GPU [default: 80 % of the free memory]";
    },
    flags! { MEMORY, TRAININGS | PLAN;
        "activations.plan", "--activations" ~ "--gradient-checkpointing" => choice::<ActivationPlan>("PLAN"),
            "Which layers keep their activations for backward [default: auto]";
        "activations.recompute", "--recompute-what" => choice::<Recomputed>("WHAT"),
            "What a layer that does not keep its activations recomputes [default: layer]";
        "activations.plan", "--recompute" => switch("\"recompute\""), "Short for --activations recompute",
            |argument| argument.conflicts_with("activations");
        "mlp.level", "--mlp" => text("LEVEL"),
            "Checkpoint level of the MLPs: save-all, save-gate-up, save-one, input-only or input-only-tiled:SIZE [default: the model's own MLP]";
        "loss.head", "--loss" => choice::<LossHeadKind>("HEAD"), "Loss head [default: auto]";
        "loss.chunk_tokens", "--loss-chunk" => whole("TOKENS"),
            "Tokens whose logits exist at a time in the fused loss [default: as many as fit 128 MiB on a CPU, 1 GiB on a GPU]";
        "loss.router_aux_loss", "--router-aux-loss" | "--router-aux-loss-coef" => number("COEFFICIENT"),
            "Coefficient of the load-balancing loss of a mixture's routers, such as 0.001 [default: none]";
        "offload.tier", "--offload" => choice::<OffloadTier>("TIER"),
            "Offload the layers' weights, and load them when they are needed";
        "offload.method", "--offload-method" => choice::<OffloadMethod>("METHOD"),
            "How offloaded layers are transferred [default: overlap]";
        "offload.ring", "--ring" => whole("LAYERS"), "Number of offloaded layers on the device at a time [default: 3]";
        "experts.cache", "--offload-experts" => Takes::One { name: "BYTES", parser: values::bytes },
            "Stream the experts of a mixture from files through this much memory: those that a batch's tokens are given to are loaded";
        "offload.resident", "--resident" => list("NUMBERS", values::parsed::<u64>, values::array),
            "Layers that are not offloaded: numbers from 0, separated by commas";
        "optimizer.place", "--optimizer-on" => choice::<OptimizerPlace>("PLACE"),
            "Where the optimizer state of offloaded layers is stored and updated [default: device]";
        "optimizer.in_backward", "--fused-optimizer" => switch("true"),
            "Update each weight during backward, and free its gradient; without clipping (--clip 0) or accumulation";
    },
    flags! { MEMORY, TRAININGS | PLAN;
        "optimizer.zero_stage", "--zero-stage" => Takes::One { name: "STAGE", parser: values::zero_stage },
            "ZeRO stage of a training over several ranks (`frugal launch`): 1 shards the optimizer state, 2 also the gradients, 3 also the layers' weights [default: auto, the fastest that the plan finds within the budget]";
        "optimizer.replicas", "--replicas" => whole("REPLICAS"),
            "Replicas among which the ranks are divided (hybrid sharding): the ranks of each shard weights, gradients and optimizer state among them, and layers are gathered within a replica [default: 1]";
        "training.sequence_parallel_size", "--sequence-parallel-size" | "--sp-size" => whole("RANKS"),
            "Ranks that divide each row of tokens among them, for rows that are too long for one; it divides the attention heads [default: 1]";
    },
    flags! { OPTIMIZER, TRAININGS | PLAN;
        "precision.compute", "--precision" => choice::<Compute>("PRECISION"),
            "Precision of matrix products (autocast) [default: fp32, no autocast]";
        "optimizer.rule", "--optimizer" ~ "--optim" => choice::<OptimizerRule>("OPTIMIZER"),
            "Update rule, with its usual coefficients; bytes of state per weight: adamw 8, muon and lion 4, adamw8bit 2, adafactor nearly 0 [default: adamw]";
        "optimizer.master_weights", "--master-weights" => choice::<MasterWeights>("HOW"),
            "How trained weights in bf16 and fp16 take updates smaller than their last digit [default: auto]";
        "optimizer.lr", "--lr" | "--learning-rate" => number("LR"),
            "Learning rate; with an objective over pairs 1e-5, and 1e-6 for all weights; with --optimizer lion a fifth of it [default: 2e-4, with --method full 2e-5; for train: 1e-3]";
        "optimizer.schedule", "--schedule" ~ "--lr-scheduler-type" => choice::<ScheduleArg>("SCHEDULE"),
            "Learning-rate schedule after warm-up [default: cosine; for train: constant]";
        "optimizer.warmup", "--warmup" ~ "--warmup-ratio" ~ "--warmup-steps" => number("SHARE_OR_STEPS"),
            "Warm-up steps; below 1, a share of all steps [default: 0.03; for train: 0]";
        "optimizer.weight_decay", "--weight-decay" => number("WEIGHT_DECAY"),
            "Weight decay of matrices: an L2 penalty for sgd, momentum, nesterov, adagrad, rmsprop and adam, decoupled for the others; with --optimizer lion five times as much [default: 0; for train: 0.1]";
        "optimizer.clip", "--clip" ~ "--max-grad-norm" => number("CLIP"),
            "Maximum gradient norm; 0 for no clipping [default: 1; for train: 0]";
    },
    flags! { OPTIONS, RESUME;
        "training.budget", "--budget" => Takes::One { name: "BYTES", parser: values::bytes },
            "Memory limit from here on, such as 3GiB [default: as before]";
    },
    flags! { RUN, TRAININGS | RESUME | PLAN;
        "", "--set" => several("KEY=VALUE"),
            "Set a value of the configuration by its key, such as optimizer.lr=1e-4; may be given several times. Overrides the file, and is overridden by flags";
        "training.patience", "--patience" => whole("N"),
            "Stop after N evaluations in a row that are no better than the best [default: make all steps]";
        "training.baseline", "--no-baseline" => switch("false"), "Skip the evaluation before the first step";
        "training.samples", "--samples" => whole("N"),
            "Number of validation rows whose answers before and after are shown at the end; 0 for none [default: 5]";
    },
    flags! { DATA, TRAININGS | RESUME;
        "data.held_out", "--held-out" => number("SHARE"),
            "Share of the rows to hold out for validation where the data has no validation split: 1 row at least and 1,000 at most, none of fewer than 50; 0 for none [default: 0.02]";
    },
    flags! { OPTIONS, TRAIN;
        "model.shape.family", "--model" => text("SHAPE_OR_FILE"),
            "gpt2-like, gpt2, or a decoder's config.json, whose model also generates, chats and is exported [default: gpt2-like]";
        "model.shape.width", "--width" => Takes::One { name: "WIDTH", parser: values::size },
            "Width of the hidden states [default: 64]";
        "model.shape.heads", "--heads" => Takes::One { name: "HEADS", parser: values::size }, "Attention heads [default: 4]";
        "model.shape.layers", "--layers" => Takes::One { name: "LAYERS", parser: values::size }, "Layers (gpt2) [default: 2]";
        "model.shape.dropout", "--dropout" => number("DROPOUT"),
            "Dropout probability; attention weights are dropped too, which rules out fused attention kernels [default: 0]";
        "training.ignore_failed_checkpoints", "--ignore-failed-checkpoints" => switch("true"),
            "Continue when a checkpoint cannot be written";
    },
    flags! { COMMON_OPTIONS, COMMON;
        "training.device", "--device" => text("DEVICE"),
            "Where to compute: auto (the GPU if one is usable, else the CPU; to merge and export, the CPU), cpu, cuda or cuda:N [default: auto]",
            |argument| argument.global(true);
        "training.seed", "--seed" => whole("SEED"), "Seed of every random choice [default: 0]",
            |argument| argument.global(true);
    },
];
