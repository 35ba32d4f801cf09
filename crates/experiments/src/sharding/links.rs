//! `sharding links`: steps over two machines, whose cable has a limited rate.
//!
//! The machines are network namespaces of this one, which share its processor: without a limit the cable is as fast as memory. A queue in
//! front of it limits the rate.

use std::process::Stdio;
use std::time::Instant;

use accounting::Decoder;
use accounting::memory::recipe::Recipe;
use accounting::memory::zero::ZeroStage;
use accounting::sharding::Layout;
use anyhow::{Context, anyhow, ensure};
use report::{Case, Metric};

use super::cost::numbers;
use super::machines::{INTERFACE, Machines};
use super::model::Sizes;
use super::rank::{self, ALONE, DEADLINE, Measured, SLOTS, seconds_alone};
use crate::driver::Bench;

#[derive(clap::Args)]
pub(crate) struct LinksArgs {
    /// Rates of the cable in Mbit/s; 0 for no limit
    #[arg(long, value_delimiter = ',', default_value = "0,1000,300")]
    rates: Vec<u32>,
    /// Measured steps
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Tokens of each rank in a step
    #[arg(long, default_value_t = 512)]
    tokens: i64,
    /// Measure the model of a smoke run
    #[arg(long)]
    tiny: bool,
}

/// A way to divide a training over the machines.
struct Division {
    /// What the figures call it.
    name: &'static str,
    stage: ZeroStage,
    variant: &'static str,
    ranks_per_machine: usize,
    /// Whether each machine has a whole copy.
    hybrid: bool,
}

const DIVISIONS: [Division; 4] = [
    Division {
        name: "ZeRO-2, a rank on each machine",
        stage: ZeroStage::Two,
        variant: "ZeRO-2",
        ranks_per_machine: 1,
        hybrid: false,
    },
    Division {
        name: "ZeRO-3, a rank on each machine",
        stage: ZeroStage::Three,
        variant: "ZeRO-3",
        ranks_per_machine: 1,
        hybrid: false,
    },
    Division {
        name: "ZeRO-3, two ranks on each machine",
        stage: ZeroStage::Three,
        variant: "ZeRO-3",
        ranks_per_machine: 2,
        hybrid: false,
    },
    Division {
        name: "ZeRO-3, a replica of two ranks on each machine",
        stage: ZeroStage::Three,
        variant: "ZeRO-3",
        ranks_per_machine: 2,
        hybrid: true,
    },
];

pub(crate) fn run(bench: &mut Bench, arguments: &LinksArgs) -> anyhow::Result<()> {
    if let Err(why) = Machines::new() {
        bench.print(&format!("skipped: {why}"));
        return Ok(());
    }
    let base = if arguments.tiny { Sizes::TINY } else { Sizes::LARGE };
    let sizes = Sizes { tokens: arguments.tokens, ..base };
    let cases =
        arguments.rates.iter().flat_map(|&rate| DIVISIONS.iter().map(move |division| (rate, division)));
    let label = |(rate, division): &(u32, &Division)| format!("{}, {}", rate_name(*rate), division.name);
    bench
        .each(cases, label, |bench, (rate, division)| measure(bench, &sizes, arguments.steps, rate, division))
}

fn rate_name(rate: u32) -> String {
    if rate == 0 { "no limit".to_owned() } else { format!("{rate} Mbit/s") }
}

fn measure(
    bench: &mut Bench,
    sizes: &Sizes,
    steps: usize,
    rate: u32,
    division: &Division,
) -> anyhow::Result<()> {
    let machines = Machines::new().map_err(|why| anyhow!(why))?;
    if rate > 0 {
        let rate = format!("{rate}mbit");
        let words = ["tbf", "rate", &rate, "burst", "256kb", "latency", "100ms"];
        machines.queue(&words).map_err(|why| anyhow!("a cable of {rate}: {why}"))?;
    }
    let ranks = 2 * division.ranks_per_machine;
    let replicas = if division.hybrid { 2 } else { 1 };
    let further = ["--interface", INTERFACE, "--replicas", &replicas.to_string()].map(str::to_owned);
    let words = rank::words(sizes, &[ALONE, division.variant], steps, &further);
    let measured = over_machines(&machines, division.ranks_per_machine, &words)?;
    let of = |rank: usize| -> anyhow::Result<&Measured> {
        measured[rank].iter().find(|one| one.variant == division.variant).context("a rank measured nothing")
    };
    // Of the machine that sends more: both directions of a cable are used at once.
    let firsts = [of(0)?, of(division.ranks_per_machine)?];
    let on_link: Vec<f64> = (0..steps)
        .map(|step| firsts.map(|one| one.link_bytes[step]).into_iter().max().unwrap_or(0) as f64)
        .collect();
    let predicted = predicted(sizes, division, ranks)?;
    let seconds = &of(0)?.seconds;
    let alone = seconds_alone(&measured[0], division.variant);
    let case = Case::new().with("rate_mbit", rate).with("division", division.name);
    let mut metrics = vec![
        Metric::of_samples("step_seconds", "s", seconds),
        Metric::of_samples("alone_seconds", "s", alone),
        Metric::of_samples("link_bytes", "B", &on_link),
        Metric::exact("predicted_link_bytes", "B", predicted),
        Metric::of_samples(
            "link_over_predicted",
            "ratio",
            &on_link.iter().map(|bytes| bytes / predicted).collect::<Vec<_>>(),
        ),
    ];
    if rate > 0 {
        let least: Vec<f64> = alone
            .iter()
            .zip(&on_link)
            .map(|(alone, bytes)| alone.max(bytes * 8.0 / (f64::from(rate) * 1e6)))
            .collect();
        let ratios: Vec<f64> = seconds.iter().zip(&least).map(|(seconds, least)| seconds / least).collect();
        metrics.push(Metric::of_samples("least_seconds", "s", &least));
        metrics.push(Metric::of_samples("time_vs_least", "ratio", &ratios));
    }
    bench.put(&case, metrics)?;
    for (step, loss) in of(0)?.losses.iter().enumerate() {
        bench.put(&case.clone().with("step", step + 1), vec![Metric::exact("loss", "nats", *loss)])?;
    }
    Ok(())
}

/// The bytes of tensors that the machine with more to send puts on the cable in a step.
fn predicted(sizes: &Sizes, division: &Division, ranks: usize) -> anyhow::Result<f64> {
    let model = Decoder::from_config(&sizes.config())?;
    let (of_replica, replicas) = if division.hybrid { (ranks as u64 / 2, 2) } else { (ranks as u64, 1) };
    let layout =
        Layout::of_decoder_in(&model, &Recipe::FP32, division.stage, of_replica, sizes.bucket_bytes as u64)?
            .with_replicas(replicas)?;
    let parameters = model.parameter_tensors()?.len();
    let mut machines = [0; 2];
    for rank in 0..ranks {
        for to in (0..ranks).filter(|to| to / division.ranks_per_machine != rank / division.ranks_per_machine)
        {
            let sent = layout.sent_bytes_to(rank as u64, to as u64, 1, SLOTS as u64)?;
            machines[rank / division.ranks_per_machine] +=
                sent + numbers(parameters, ranks, ranks) / (ranks as u64 - 1);
        }
    }
    Ok(machines[0].max(machines[1]) as f64)
}

/// Runs this program as ranks on both machines, a thread each, and returns what each rank measured.
fn over_machines(
    machines: &Machines,
    on_a_machine: usize,
    words: &[String],
) -> anyhow::Result<Vec<Vec<Measured>>> {
    let program = std::env::current_exe().context("finding this program to run it again")?;
    let mut children = Vec::new();
    for rank in 0..2 * on_a_machine {
        let mut command = machines.command(rank / on_a_machine, &program);
        command.args(words).env("OMP_NUM_THREADS", "1").env("MKL_NUM_THREADS", "1");
        command.env("MASTER_ADDR", Machines::address(0)).env("MASTER_PORT", "29500");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", (2 * on_a_machine).to_string());
        command.env("LOCAL_RANK", (rank % on_a_machine).to_string());
        command.env("LOCAL_WORLD_SIZE", on_a_machine.to_string());
        command.env_remove("GLOO_SOCKET_IFNAME").env_remove("TORCHELASTIC_USE_AGENT_STORE");
        children.push(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
    }
    let until = Instant::now() + DEADLINE;
    let mut failed = false;
    while !failed && children.iter_mut().any(|child| matches!(child.try_wait(), Ok(None))) {
        // The others wait for one that has failed.
        let ended_badly = |child: &mut std::process::Child| matches!(child.try_wait(), Ok(Some(status)) if !status.success());
        failed = children.iter_mut().any(ended_badly) || Instant::now() > until;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    if failed {
        children.iter_mut().for_each(|child| drop(child.kill()));
    }
    let mut printed = Vec::new();
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success(),
            "rank {rank} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        printed.push(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect());
    }
    rank::read(printed)
}
