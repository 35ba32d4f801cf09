//! A rank of a measured training.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use models::module;
use offload::Offload;
use runtime::collectives::{Group, GroupConfig, Launch, Store};
use runtime::memory::{self, Region};
use runtime::profile::{Trace, TraceConfig};
use serde::{Deserialize, Serialize};
use sharding::{FrozenWeights, Mesh, ShardedOptimizer, ShardingConfig, Shards, Stage};
use tch::Device;
use training::activations::{Activations, LayerPlan};
use training::layer_source::LayerSource;
use training::observer::Collect;
use training::optimizer::{self, AdamW, DeviceOptimizer, Optimizer};
use training::{Trainer, trainer};

use super::model::{self, HashedBatches, Sizes};
use super::timeline::{self, Span};

/// A training of each rank by itself.
pub(crate) const ALONE: &str = "alone";
/// The same, with every layer run again in backward.
pub(crate) const RECOMPUTED: &str = "alone recomputed";
/// The variants over ranks. Layers keep their activations, but for those of the last.
pub(crate) const STAGES: [&str; 4] = ["ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 recomputed"];
/// Slots for the gathered layers of ZeRO-3.
pub(crate) const SLOTS: usize = 3;
/// Steps before anything is measured: the first finds out how often each gradient is added to.
const WARMUP: usize = 2;
const LEARNING_RATE: f64 = 1e-4;

#[derive(Args)]
pub(crate) struct Rank {
    #[command(flatten)]
    sizes: Sizes,
    /// Variants, which run in turns
    #[arg(long, value_delimiter = ',')]
    variants: Vec<String>,
    /// Measured steps of each
    #[arg(long)]
    steps: usize,
    /// Micro-batches of each rank in a step
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Replicas among which the ranks are divided
    #[arg(long, default_value_t = 1)]
    replicas: usize,
    /// Ranks that divide each row
    #[arg(long, default_value_t = 1)]
    sequence_ranks: usize,
    /// The network interface whose sent bytes are counted
    #[arg(long)]
    interface: Option<String>,
    /// The rank to be of a group whose other ranks are not there, and their number
    #[arg(long, num_args = 2, value_names = ["RANK", "RANKS"])]
    fake: Vec<usize>,
    /// Trace a step, and keep the trace in this folder
    #[arg(long)]
    trace: Option<PathBuf>,
}

/// Measurements of a variant on a rank; printed as a line.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) variant: String,
    /// Seconds of each step.
    pub(crate) seconds: Vec<f64>,
    /// Losses of all steps, from the first on.
    pub(crate) losses: Vec<f64>,
    /// Projections of the parameters after all steps.
    pub(crate) projections: Vec<f64>,
    /// Peak above what there was before the model, after the warm-up; of the process, so of one variant only.
    pub(crate) peak_bytes: u64,
    /// Bytes that this rank sent in a step, gathers of layers included.
    pub(crate) sent_bytes: u64,
    /// Bytes that this machine put on the interface in each step, headers included.
    #[serde(default)]
    pub(crate) link_bytes: Vec<u64>,
    pub(crate) spans: Vec<Span>,
}

/// A training under way.
struct Training {
    trainer: Trainer,
    batches: HashedBatches,
    records: Collect,
    measured: Measured,
    mesh: Mesh,
    /// The group that gathers layers.
    gathers: Option<Group>,
    _handles: (Option<Activations>, Option<Offload>),
}

impl Training {
    /// A training of these ranks, over a group of its own.
    fn new(arguments: &Rank, variant: &str, ranks: &Group) -> anyhow::Result<Self> {
        let group = &ranks.duplicate(variant)?;
        let mesh = Mesh::new(group, arguments.replicas)?.with_sequence(arguments.sequence_ranks)?;
        let mut model = arguments.sizes.model()?;
        let mut handles = (None, None);
        let mut shards = None;
        let layers = usize::try_from(arguments.sizes.layers)?;
        if variant == RECOMPUTED {
            handles.0 = Some(Activations::install(model.as_mut(), &vec![LayerPlan::RecomputeAll; layers])?);
        } else if stage(variant) == Some(Stage::Three) {
            let divided = Shards::new(mesh.clone(), FrozenWeights::default())?;
            let source: Option<Arc<dyn LayerSource>> = Some(Arc::new(divided.clone()));
            let keep = if is_recomputed(variant) { Vec::new() } else { (0..layers).collect() };
            let options =
                offload::OffloadConfig { source, ring: SLOTS, keep, ..offload::OffloadConfig::default() };
            handles.1 = Some(options.install(model.as_mut())?);
            shards = Some(divided);
        }
        let gathers = shards.as_ref().map(|shards| shards.gathers().clone());
        let parameters = optimizer::Group {
            weight_decay: 0.01,
            ..optimizer::Group::new(module::trainable(model.as_ref()), LEARNING_RATE)
        };
        let (ranks, rank) = (u32::try_from(group.size())?, u32::try_from(group.rank())?);
        // Ranks that train together all read every micro-batch, and share them by their number.
        let (optimizer, together): (Box<dyn Optimizer>, _) = match (variant, stage(variant)) {
            (ALONE | RECOMPUTED, _) => {
                (Box::new(DeviceOptimizer::new(AdamW::default(), vec![parameters])?), false)
            }
            (_, Some(stage)) => {
                let bucket_bytes = arguments.sizes.bucket_bytes;
                let options = ShardingConfig { stage, bucket_bytes, shards, ..ShardingConfig::default() };
                (
                    Box::new(ShardedOptimizer::new(
                        AdamW::default(),
                        vec![parameters],
                        mesh.clone(),
                        options,
                    )?),
                    true,
                )
            }
            (other, None) => bail!("unknown variant `{other}`"),
        };
        let taken = if together { group.size() / arguments.sequence_ranks } else { 1 };
        let accumulation = arguments.rounds * taken;
        let (next, stride) = if together { (0, 1) } else { (rank, ranks) };
        let batches = HashedBatches { sizes: arguments.sizes, next, stride };
        let options = trainer::TrainerConfig {
            steps: 0,
            accumulation,
            log_every: 1,
            ..trainer::TrainerConfig::default()
        };
        let mut trainer = Trainer::new(model, optimizer, options)?;
        let records = Collect::default();
        trainer.observers.push(Box::new(records.clone()));
        let measured = Measured { variant: variant.to_owned(), ..Measured::default() };
        Ok(Self { trainer, batches, records, measured, mesh, gathers, _handles: handles })
    }

    fn step(&mut self) -> anyhow::Result<()> {
        self.trainer.options.steps += 1;
        self.trainer.run(&mut self.batches, None)?;
        Ok(())
    }

    /// Bytes that this rank has sent.
    fn sent(&self) -> u64 {
        let of_replicas = self.mesh.groups().filter(|_| self.mesh.replicas() > 1);
        let others = of_replicas.chain(&self.gathers).chain(self.mesh.sequence());
        let groups = std::iter::once(self.mesh.world()).chain(others);
        groups.map(|group| group.bytes().sent).sum()
    }
}

fn stage(variant: &str) -> Option<Stage> {
    let stages = [Stage::One, Stage::Two, Stage::Three, Stage::Three];
    STAGES.iter().zip(stages).find(|(name, _)| **name == variant).map(|(_, stage)| stage)
}

/// Whether every layer runs again in backward.
pub(crate) fn is_recomputed(variant: &str) -> bool {
    variant.ends_with("recomputed")
}

/// Returns the variant that computes the same without other ranks.
fn baseline(variant: &str) -> &'static str {
    if is_recomputed(variant) { RECOMPUTED } else { ALONE }
}

/// The seconds of each step of a variant's baseline.
pub(crate) fn seconds_alone<'a>(measured: &'a [Measured], variant: &str) -> &'a [f64] {
    let alone = measured.iter().find(|one| one.variant == baseline(variant));
    alone.map_or(&[], |alone| &alone.seconds)
}

pub(crate) fn run(arguments: &Rank) -> anyhow::Result<()> {
    let launch =
        Launch::from_environment()?.context("this verb is run by `cost` and `bench`, as their ranks")?;
    tch::set_num_threads(1);
    memory::track_cpu()?;
    let store = Store::connect(&launch, Duration::from_secs(60))?;
    let group = match arguments.fake[..] {
        [rank, ranks] => Group::fake(rank, ranks)?,
        _ => Group::new(&store, "measured", GroupConfig::default())?,
    };
    let before = memory::live_bytes(Device::Cpu)?;
    let mut trainings = Vec::new();
    for variant in &arguments.variants {
        trainings.push(Training::new(arguments, variant, &group)?);
    }
    for _ in 0..WARMUP {
        trainings.iter_mut().try_for_each(Training::step)?;
    }
    let region = Region::start(Device::Cpu)?;
    for _ in 0..arguments.steps {
        for training in &mut trainings {
            group.barrier("before")?;
            let before = arguments.interface.as_deref().map(sent_over).transpose()?;
            let (sent, start) = (training.sent(), Instant::now());
            training.step()?;
            group.barrier("after")?;
            training.measured.seconds.push(start.elapsed().as_secs_f64());
            training.measured.sent_bytes = training.sent() - sent;
            let after = arguments.interface.as_deref().map(sent_over).transpose()?;
            training.measured.link_bytes.extend(after.zip(before).map(|(after, before)| after - before));
        }
    }
    let peak = region.finish()?.peak.saturating_sub(before);
    for training in &mut trainings {
        training.measured.peak_bytes = peak;
        training.measured.losses = training.records.take().iter().map(|record| record.loss).collect();
        if stage(&training.measured.variant).is_some() {
            training.measured.projections = model::projections(&training.trainer)?;
        }
        if let Some(folder) = &arguments.trace {
            let path = folder.join(format!("{}-rank-{}.json", training.measured.variant, group.rank()));
            group.barrier("before the trace")?;
            let trace = Trace::start(TraceConfig { cuda: false, shapes: false, memory: false })?;
            training.step()?;
            group.barrier("after the trace")?;
            trace.save(&path)?;
            training.measured.spans = timeline::read(&path)?;
        }
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&training.measured)?)?;
    }
    group.barrier("end")?;
    Ok(())
}

/// The bytes that an interface has sent.
fn sent_over(interface: &str) -> anyhow::Result<u64> {
    let path = format!("/sys/class/net/{interface}/statistics/tx_bytes");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    text.trim().parse().with_context(|| format!("{path} has {text:?}"))
}

/// The longest that ranks may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(1800);

/// The words that make this program a rank of these trainings.
pub(crate) fn words(sizes: &Sizes, variants: &[&str], steps: usize, further: &[String]) -> Vec<String> {
    let mut words = vec!["sharding".to_owned(), "rank".to_owned()];
    words.extend(sizes.flags());
    words.extend(["--variants".to_owned(), variants.join(","), "--steps".to_owned(), steps.to_string()]);
    words.extend_from_slice(further);
    words
}

/// Reads what ranks have printed.
pub(crate) fn read(printed: Vec<Vec<String>>) -> anyhow::Result<Vec<Vec<Measured>>> {
    let read = |line: &String| serde_json::from_str(line).with_context(|| format!("a rank printed `{line}`"));
    printed.iter().map(|lines| lines.iter().map(read).collect()).collect()
}

/// Runs ranks, and returns what each measured of each variant.
pub(crate) fn measure(
    ranks: usize,
    sizes: &Sizes,
    variants: &[&str],
    steps: usize,
    further: &[String],
) -> anyhow::Result<Vec<Vec<Measured>>> {
    read(crate::processes::run(ranks, &words(sizes, variants, steps, further), DEADLINE)?)
}
