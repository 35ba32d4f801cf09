//! NVRTC as a child process: xtask holds no unsafe code, and Python opens libraries too.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Input of the script.
#[derive(Serialize)]
pub(super) struct Request<'a> {
    /// Where NVRTC is.
    pub(super) folder: &'a Path,
    pub(super) text: &'a str,
    /// Names and texts of the headers.
    pub(super) headers: serde_json::Map<String, serde_json::Value>,
    pub(super) expressions: &'a [&'a str],
    pub(super) options: &'a [String],
    /// Where the machine code is written, if it is wanted.
    pub(super) cubin: Option<&'a Path>,
}

/// Output of the script.
#[derive(Deserialize)]
pub(super) struct Compiled {
    pub(super) ptx: String,
    /// The log of the assembler.
    pub(super) log: String,
    /// The kernels' names, in the order of the expressions.
    pub(super) names: Vec<String>,
}

pub(super) fn compile(python: &Path, request: &Request<'_>) -> Result<Compiled> {
    let mut child = Command::new(python)
        .args(["-c", include_str!("compile.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", python.display()))?;
    let input = serde_json::to_vec(request)?;
    child.stdin.take().context("no standard input")?.write_all(&input)?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the compiler's answer is not what was expected")
}

/// Registers and spilled bytes of a kernel, from the assembler's log.
pub(super) fn registers(log: &str, name: &str) -> Option<(u32, u32)> {
    let of_kernel = log.split_once(&format!("'{name}'"))?.1;
    let of_kernel = of_kernel.split("Compile time").next()?;
    let before = |after: &str| -> Option<u32> {
        of_kernel.split_once(after)?.0.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    Some((before(" registers")?, before(" bytes spill stores")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : Compiling entry function 'f' for 'sm_80'\n\
                   ptxas         .     0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
                   ptxas info    : Used 64 registers, used 1 barriers, 192 bytes smem, 428 bytes cmem[0]\n\
                   ptxas info    : Compile time = 41.731 ms\n";
        assert_eq!(registers(log, "f"), Some((64, 12)));
        assert_eq!(registers(log, "g"), None);
    }
}
