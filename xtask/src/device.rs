//! `--device`: where the programs compute.

use std::fmt;
use std::process::Command;
use std::str::FromStr;

use anyhow::{Result, bail};

use crate::setup::nvidia_driver;
use crate::torch::Variant;

/// `cpu`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Device {
    #[default]
    Cpu,
    Cuda(Option<u32>),
}

impl Device {
    /// Refuses CUDA where no driver is, before anything is installed or built for it.
    pub(crate) fn check(self) -> Result<()> {
        if self != Self::Cpu && !nvidia_driver() {
            bail!(
                "--device {self} needs an NVIDIA driver, and none is visible (no /proc/driver/nvidia, no \
                 libcuda.so.1); use --device cpu, or a machine with an NVIDIA GPU"
            );
        }
        Ok(())
    }

    /// The name of the report's folder on this device: the GPU's, such as `h200`, so that figures of two GPUs never mix.
    pub(crate) fn folder_name(self) -> String {
        let Self::Cuda(index) = self else { return "cpu".into() };
        let mut entries: Vec<_> = std::fs::read_dir("/proc/driver/nvidia/gpus")
            .map(|entries| entries.flatten().map(|entry| entry.path().join("information")).collect())
            .unwrap_or_default();
        entries.sort();
        let models: Vec<String> = entries
            .iter()
            .filter_map(|path| std::fs::read_to_string(path).ok())
            .filter_map(|text| {
                Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned())
            })
            .collect();
        let index = index.unwrap_or(0) as usize;
        let model = models.get(index).or(models.first()).cloned().or_else(|| listed_gpu(index));
        model.map_or_else(|| "gpu".into(), |model| folder_of(&model))
    }

    /// The libtorch that it needs; the CPU is served by any.
    pub(crate) fn variant(self) -> Option<Variant> {
        (self != Self::Cpu).then_some(Variant::Cuda)
    }
}

/// The name of a GPU as `nvidia-smi` lists it.
fn listed_gpu(index: usize) -> Option<String> {
    let arguments = ["--query-gpu=name", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().nth(index).or(text.lines().next()).map(|line| line.trim().to_owned())
}

/// A folder's name from the name of a GPU.
fn folder_of(model: &str) -> String {
    let lower = model.to_lowercase();
    let words = lower.split(|char: char| !char.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty() && *word != "nvidia").collect();
    if words.is_empty() { "gpu".into() } else { words.join("-") }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => return Ok(Self::Cuda(None)),
            Some(("cuda", index)) if index.bytes().all(|byte| byte.is_ascii_digit()) => {
                if let Ok(index) = index.parse() {
                    return Ok(Self::Cuda(Some(index)));
                }
            }
            _ => {}
        }
        Err("expected cpu, cuda or cuda:N".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_the_name_of_the_gpu() {
        assert_eq!(folder_of("NVIDIA H200"), "h200");
        assert_eq!(folder_of("NVIDIA H100 80GB HBM3"), "h100-80gb-hbm3");
        assert_eq!(folder_of("Tesla T4"), "tesla-t4");
        assert_eq!(folder_of("NVIDIA"), "gpu");
        assert_eq!(Device::Cpu.folder_name(), "cpu");
    }

    #[test]
    fn devices_are_written_as_they_are_read() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:11"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cpu:0", "CPU", "cuda:99999999999"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
