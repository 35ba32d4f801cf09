//! `--device`: where the programs compute.

use std::fmt;
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

    /// The libtorch that it needs; the CPU is served by any.
    pub(crate) fn variant(self) -> Option<Variant> {
        (self != Self::Cpu).then_some(Variant::Cuda)
    }
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
    fn devices_are_written_as_they_are_read() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:11"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cpu:0", "CPU", "cuda:99999999999"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
