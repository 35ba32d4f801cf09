//! `frugal doctor`: what this machine offers, and what is missing.

use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use frugal::dataloading::chat::Date;
use frugal::models::hub::Hub;
use frugal::planning::KnownRates;
use report::Environment;
use report::unit::human;
use runtime::device::graph::CapturedStep;
use runtime::device::{self, memory_info};
use runtime::wait_policy::WaitPolicy;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::output::print_fields;
use crate::common_flags::Common;

#[derive(Args)]
pub(crate) struct Doctor {
    /// Never use the network
    #[arg(long)]
    offline: bool,
    /// Skip measuring rates that are not cached yet (it takes some seconds)
    #[arg(long)]
    fast: bool,
    /// Measure the rates again, and keep them for plans
    #[arg(long, conflicts_with = "fast")]
    measure: bool,
    /// A folder on the disk whose free space is shown
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,
}

pub(crate) fn run(common: &Common, arguments: &Doctor) -> anyhow::Result<()> {
    let mut lines = Vec::new();
    let mut show = |name: &str, text: String, value: Value| lines.push((name.to_owned(), text, value));
    let environment = Environment::detect("cpu", None);
    let torch = runtime::torch_version();
    show("libtorch", torch.to_owned(), json!(torch));
    let path = loaded("libtorch_cpu");
    let shown =
        path.as_ref().map_or_else(|| "linked statically".to_owned(), |path| path.display().to_string());
    show("libtorch path", shown, json!(path));
    show("processor", environment.cpu.clone(), json!(environment.cpu));
    let threads = tch::get_num_threads();
    show("threads", threads_text(threads, environment.threads), json!(threads));
    let policy = WaitPolicy::of_process().to_string();
    show("waiting threads", policy.clone(), json!(policy));
    let implementations = kernels::processor::choices()?.to_string();
    show("implementations", implementations.clone(), json!(implementations));
    for device in devices()? {
        let name = device::name(device)?;
        let flag = device::flag(device);
        let memory = memory_info(device)?;
        show(&format!("device {flag}"), name.clone(), json!(name));
        show(
            &format!("memory of {flag}"),
            format!("{} free of {}", human(memory.free as f64, "B"), human(memory.total as f64, "B")),
            json!({ "free": memory.free, "total": memory.total }),
        );
        let captured = captured(device);
        show(&format!("captured steps on {flag}"), captured.clone(), json!(captured));
        let known = match (arguments.measure, arguments.fast) {
            (true, _) => Some(KnownRates::measure(device, Kind::Float, 1)?),
            (false, true) => KnownRates::kept(device, Kind::Float, 1),
            (false, false) => Some(KnownRates::get(device, Kind::Float)?),
        };
        if let Some(known) = known {
            for (what, rate, unit) in [
                ("products on", known.flops, "FLOP/s"),
                ("copies on", known.bandwidth, "B/s"),
                ("layers from host memory to", known.host_load, "B/s"),
                ("layers from files to", known.file_load, "B/s"),
                ("AdamW with state in files on", known.file_optimizer, "parameters/s"),
            ] {
                show(&format!("{what} {flag}"), human(rate, unit), json!(rate));
            }
            if let Some(seconds) = known.measured_at {
                let date = Date::of_unix_time(seconds).to_string();
                show(&format!("rates of {flag}"), format!("measured on {date}"), json!(date));
            }
        }
    }
    // Physical memory. The rows of devices above show the control group's limit if it is lower.
    show("installed memory", human(environment.memory_bytes as f64, "B"), json!(environment.memory_bytes));
    let group = device::control_group()?.map(|group| group.limit);
    let shown = group.map_or_else(|| "none".to_owned(), |bytes| human(bytes as f64, "B"));
    show("control group limit", shown, json!(group));
    let disk = free_disk(&arguments.folder)?;
    show("free disk", format!("{} in {}", human(disk as f64, "B"), arguments.folder.display()), json!(disk));
    let hub = hub(arguments.offline);
    show("hub", hub.clone(), json!(hub));
    print_fields(common.json, lines);
    Ok(())
}

/// The threads that this process computes with, and why.
fn threads_text(threads: i32, processors: usize) -> String {
    match std::env::var("OMP_NUM_THREADS") {
        Ok(asked) => format!("{threads} (OMP_NUM_THREADS={asked}; {processors} processors)"),
        Err(_) => format!("{threads} ({processors} processors)"),
    }
}

/// Whether a graph can repeat steps on a device: one of an addition is captured and repeated.
fn captured(device: Device) -> String {
    if !device.is_cuda() {
        return "no: on a CPU a launch is a call".to_owned();
    }
    let try_one = || -> runtime::Result<()> {
        let mut sum = Tensor::f_zeros([1], (Kind::Float, device))?;
        let one = sum.f_ones_like()?;
        let mut step = CapturedStep::capture(device, move || Ok(sum.f_add_(&one).map(drop)?))?;
        step.replay()?;
        step.synchronize()
    };
    match try_one() {
        Ok(()) => {
            "yes, but for trainings with `--offload`, over ranks, or by a rule other than Adam and AdamW"
                .to_owned()
        }
        Err(error) => format!("no: {error}"),
    }
}

/// The CPU and every GPU.
fn devices() -> anyhow::Result<Vec<Device>> {
    let count = device::cuda_count()?;
    Ok(std::iter::once(Device::Cpu).chain((0..count).map(Device::Cuda)).collect())
}

/// The file of a library that this process has loaded.
fn loaded(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.map(Path::new).find(|path| path.to_string_lossy().contains(name)).map(Path::to_owned)
}

fn free_disk(folder: &Path) -> anyhow::Result<u64> {
    let found = rustix::fs::statvfs(folder)
        .map_err(|cause| anyhow::anyhow!("--folder {}: {}", folder.display(), std::io::Error::from(cause)))?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Whether models can be fetched.
fn hub(offline: bool) -> String {
    if Hub::from_env(offline).offline {
        return "offline: models come from the cache only".to_owned();
    }
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".to_owned());
    let reached = address_of(&endpoint)
        .to_socket_addrs()
        .and_then(|mut all| all.next().ok_or_else(|| std::io::Error::other("no address")))
        .and_then(|address| TcpStream::connect_timeout(&address, Duration::from_secs(3)));
    match reached {
        Ok(_) => format!("{endpoint} answers"),
        Err(cause) => format!(
            "{endpoint} does not answer ({cause}); models that are not in the cache cannot be fetched"
        ),
    }
}

/// Host and port of the hub's address, which may have a user, a port and a path.
fn address_of(endpoint: &str) -> String {
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("https", endpoint));
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    let host = authority.rsplit('@').next().unwrap_or(authority);
    // The colons of an IPv6 address are in brackets.
    let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
    let port = if scheme.eq_ignore_ascii_case("http") { 80 } else { 443 };
    if has_port { host.to_owned() } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::address_of;

    #[test]
    fn the_hubs_address_may_have_a_port_and_a_path() {
        for (endpoint, expected) in [
            ("https://huggingface.co", "huggingface.co:443"),
            ("http://mirror.example/hub/", "mirror.example:80"),
            ("HTTP://127.0.0.1:8097/prefix/more", "127.0.0.1:8097"),
            ("https://user:word@mirror.example?a=b", "mirror.example:443"),
            ("http://[::1]:8080/x", "[::1]:8080"),
            ("https://[::1]", "[::1]:443"),
            ("mirror.example", "mirror.example:443"),
        ] {
            assert_eq!(address_of(endpoint), expected);
        }
    }
}
