//! `offload methods`: every method against the resident model.

use accounting::offload::Method as Paper;
use clap::Args;
use offload::{Method, OffloadConfig, Tier};
use report::Metric;
use report::cli::Scale;
use tch::Device;

use super::comparison::{self, Conditions, Placement, Variant};
use super::folder::scratch;
use crate::driver::Bench;
use crate::shape::Shape;

/// The baseline without a device.
const ON_THE_CPU: &str = "all on the CPU";

#[derive(Args)]
pub(crate) struct MethodsArgs {
    /// Blocks of Qwen2.5-0.5B
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    layers: Option<i64>,
    /// Tokens of a step
    #[arg(long, value_parser = clap::value_parser!(i64).range(2..))]
    tokens: Option<i64>,
    /// How often all methods take turns
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Where layers in files lie [default: beside this program]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<std::path::PathBuf>,
}

pub(crate) fn run(bench: &mut Bench, arguments: &MethodsArgs) -> anyhow::Result<()> {
    let device = bench.device;
    runtime::memory::track_cpu()?;
    let (layers, tokens, rounds, vocabulary) =
        bench.sized([(4, 16, 1, 512), (4, 512, 1, 8192), (5, 512, 3, 8192), (24, 4096, 5, 151_936)]);
    let tokens = arguments.tokens.unwrap_or(tokens);
    let layers = arguments.layers.unwrap_or(layers);
    let shape = if bench.scale == Scale::Smoke { Shape::Tiny } else { Shape::Small };
    let config = shape.resized(layers, vocabulary, tokens)?;
    let rounds = arguments.rounds.map_or(rounds, |rounds| rounds as usize);
    let conditions = Conditions { config, device, tokens, seed: bench.seed, rounds };
    let scratch = scratch(arguments.folder.as_deref())?;
    let groups = groups(device, layers, &Tier::File(scratch.path().to_owned()));
    let turns: usize = groups.iter().map(|group| group.len() * (rounds + 1)).sum();
    bench.expect(turns);
    if device == Device::Cpu {
        // The device is the CPU: to measure it again would be to compare a model with itself.
        let why = "the device of this run is the CPU: the rows of `resident` are it";
        for pass in ["inference", "training"] {
            let case = comparison::case(pass, ON_THE_CPU, "host");
            bench.put(&case, vec![Metric::not_measured("tokens_per_second", "tokens/s", why)])?;
        }
    }
    for group in groups {
        for (case, metrics) in comparison::run(&conditions, &group, bench)? {
            bench.put(&case, metrics)?;
        }
    }
    Ok(())
}

/// The comparisons. All variants of one are in memory together.
fn groups(device: Device, layers: i64, files: &Tier) -> Vec<Vec<Variant>> {
    let of = |method: Method, ring: usize, tier: &Tier, pinned: bool| {
        let on_paper = match method {
            Method::Overlap => Paper::Overlap { ring },
            _ => Paper::OneAtATime,
        };
        let options =
            OffloadConfig { device, method, ring, tier: tier.clone(), pinned, ..OffloadConfig::default() };
        Variant {
            method: method.name(),
            tier: if *tier == Tier::Host { "host" } else { "file" },
            placement: Placement::Offloaded(options),
            paper: on_paper,
            infers: true,
            // Trained layers cannot live in files.
            trains: method != Method::OneLayer && *tier == Tier::Host,
            host_optimizer: false,
            reported: true,
        }
    };
    // The references that every group is compared with.
    let references = |reported: bool| {
        let all =
            OffloadConfig { device, resident: (0..layers as usize).collect(), ..OffloadConfig::default() };
        let resident = |method, placement, recompute| Variant {
            method,
            tier: "device",
            placement,
            paper: Paper::Resident { recompute },
            infers: true,
            trains: true,
            host_optimizer: false,
            reported,
        };
        vec![
            resident("resident", Placement::Resident, false),
            resident("resident, recomputed", Placement::Offloaded(all), true),
        ]
    };
    let host = |method, ring| of(method, ring, &Tier::Host, true);
    // All methods and tiers.
    let mut first = references(true);
    first.extend([
        host(Method::Overlap, 3),
        Variant {
            method: "overlap, optimizer on the host",
            infers: false,
            host_optimizer: true,
            ..host(Method::Overlap, 3)
        },
        host(Method::Function, 1),
        host(Method::OneLayer, 1),
        of(Method::Function, 1, files, true),
        of(Method::Overlap, 3, files, true),
    ]);
    // Other rings, and checkpoints.
    let mut second = references(false);
    second.extend([
        host(Method::Checkpointing, 1),
        host(Method::Overlap, 1),
        host(Method::Overlap, 2),
        host(Method::Overlap, 4),
    ]);
    let mut groups = vec![first, second];
    if device != Device::Cpu {
        // Pageable memory, and no device at all.
        let mut third = references(false);
        let paged = |method, ring| of(method, ring, &Tier::Host, false);
        third.extend([paged(Method::Overlap, 3), paged(Method::Function, 1)]);
        third.push(Variant {
            method: ON_THE_CPU,
            tier: "host",
            placement: Placement::Host,
            reported: true,
            ..third[0].clone()
        });
        groups.push(third);
    }
    groups
}
