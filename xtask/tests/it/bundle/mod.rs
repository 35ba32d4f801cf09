//! A bundle whose programs are shell scripts: every verb that measures runs on it as it does on the real one.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard};

/// Appends a record of the metric `seconds` with the value `$VALUE`, taken with torch `$TORCH`, to the file that `--records`
/// names.
pub(crate) const RECORD: &str = r#"
experiment=$(basename "$0")
while [ $# -gt 0 ]; do if [ "$1" = --records ]; then records=$2; fi; shift; done
echo "{\"experiment\":\"$experiment\",\"case\":{\"batch\":8},\"metric\":{\"name\":\"seconds\",\"unit\":\"s\",\"value\":${VALUE:-1.5},\"n\":1},\"environment\":{${TORCH:+\"torch\":\"$TORCH\",}\"device\":\"cpu\",\"cpu\":\"x\",\"threads\":2,\"memory_bytes\":1,\"revision\":\"$FRUGAL_REVISION\",\"unix_time\":1}}" >> "$records"
"#;

/// A program cannot start while a child that another test is about to start still has it open for writing, so one test
/// at a time writes programs and starts them.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

pub(crate) struct Bundle {
    _turn: MutexGuard<'static, ()>,
    dir: tempfile::TempDir,
    programs: Vec<String>,
}

impl Bundle {
    pub(crate) fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        for folder in ["bin", "crates/sample", "crates/experiments/experiments", "xtask/peers"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        std::fs::copy(env!("CARGO_BIN_EXE_xtask"), dir.path().join("bin/xtask")).unwrap();
        std::fs::write(dir.path().join("xtask/peers/requirements.txt"), "torch==2.15.0\n").unwrap();
        let bundle = Self { _turn: turn, dir, programs: Vec::new() };
        bundle.register("");
        bundle.manifest();
        bundle
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Writes an executable shell script.
    pub(crate) fn script(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), format!("#!/bin/sh\n{text}")).unwrap();
        std::fs::set_permissions(self.path(name), PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Adds a program.
    pub(crate) fn program(&mut self, name: &str, text: &str) {
        self.script(&format!("bin/{name}"), text);
        self.programs.push(name.to_owned());
        self.manifest();
    }

    fn manifest(&self) {
        let programs: Vec<String> =
            self.programs.iter().map(|name| format!("\"{name}\":\"bin/{name}\"")).collect();
        let text = format!(
            "{{\"revision\":\"abc1234\",\"torch\":\"2.11.0\",\"programs\":{{{}}},\"tests\":[{{\"package\":\"sample\",\
             \"name\":\"traces\",\"path\":\"bin/traces\"}}]}}",
            programs.join(",")
        );
        std::fs::write(self.path("bin/bundle.json"), text).unwrap();
    }

    /// Writes the file that registers experiments.
    pub(crate) fn register(&self, text: &str) {
        std::fs::write(self.path("crates/experiments/experiments/sample.toml"), text).unwrap();
    }

    /// The bundle's `xtask`.
    pub(crate) fn xtask(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/xtask"));
        command.args(args).env_remove("CARGO_MANIFEST_DIR").current_dir(self.dir.path());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::new(self.xtask(args).output().unwrap())
    }
}

/// The status and the output of an `xtask`.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    pub(crate) fn new(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}
