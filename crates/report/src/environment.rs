//! The machine and revision of a measurement.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The variable in which a parent process says what runs on other cores meanwhile.
pub const BESIDE_VARIABLE: &str = "FRUGAL_BESIDE";

/// The machine, revision and time of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// `cpu`, or the name of the GPU.
    pub device: String,
    /// Model name of the processor, on x86 with its family and model: AMD's names in virtual machines lack the generation.
    pub cpu: String,
    /// Threads that the computation used.
    pub threads: usize,
    /// Installed memory in bytes.
    pub memory_bytes: u64,
    /// Version of libtorch, or `None` where none is linked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torch: Option<String>,
    /// Versions of the packages that a peer used besides torch, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub packages: BTreeMap<String, String>,
    /// What ran on other cores meanwhile; `None` where the machine was left alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<String>,
    /// Implementations that CPU computations used, such as `avx512, bf16 in fp32, fp16 in fp32`; `None` if there is no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub implementations: Option<String>,
    /// Scale of the experiment, such as `laptop`; `None` where it has one size only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<String>,
    /// Short git revision, `+` after it when the tree had changes; empty outside a repository.
    pub revision: String,
    /// Seconds since 1970-01-01 UTC.
    pub unix_time: u64,
}

impl Environment {
    /// The GPU that computed, or the processor.
    pub fn machine(&self) -> &str {
        if self.device == "cpu" { &self.cpu } else { &self.device }
    }

    /// Describes this machine for a computation on `device` (`cpu` or a GPU's name).
    pub fn detect(device: &str, torch: Option<&str>) -> Self {
        let revision = std::env::var("FRUGAL_REVISION").unwrap_or_else(|_| git_revision());
        Self {
            device: device.into(),
            cpu: cpu_name(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: proc_field("/proc/meminfo", "MemTotal")
                .and_then(|value| value.trim_end_matches("kB").trim().parse::<u64>().ok())
                .map_or(0, |kib| kib * 1024),
            torch: torch.map(str::to_owned),
            packages: BTreeMap::new(),
            beside: std::env::var(BESIDE_VARIABLE).ok().filter(|text| !text.is_empty()),
            implementations: None,
            scale: None,
            revision,
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        }
    }
}

fn cpu_name() -> String {
    let field = |key| proc_field("/proc/cpuinfo", key);
    let Some(name) = field("model name") else { return std::env::consts::ARCH.to_owned() };
    match (field("cpu family"), field("model")) {
        (Some(family), Some(model)) => format!("{name} (family {family}, model {model})"),
        _ => name,
    }
}

/// The first `key : value` line of a procfs file.
fn proc_field(path: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}

fn git_revision() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(revision) = git(&["rev-parse", "--short", "HEAD"]) else { return String::new() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|s| !s.is_empty());
    if changed { revision + "+" } else { revision }
}
