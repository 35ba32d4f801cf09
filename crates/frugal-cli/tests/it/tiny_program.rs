//! The program as a process that works on a tiny model's folder.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::tiny_folder::Tiny;

impl Tiny {
    /// The program in the folder, its arguments between blanks.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(crate::program());
        command.args(arguments.split_whitespace()).current_dir(self.path(""));
        // One thread: no other order of summation, and room for other tests.
        command.env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1");
        // `--device auto` is the CPU, whose bits the tests compare.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.env("HF_HUB_CACHE", self.path("no-cache")).env("FRUGAL_CACHE", self.path("cache"));
        command
    }

    pub(crate) fn run(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a training with `--json` and kills it when it has written a step.
    pub(crate) fn kill_at_step(&self, arguments: &str, step: u64) {
        let mut child = self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let read = BufReader::new(child.stdout.take().unwrap());
        let mut steps = read.lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        assert!(steps.any(|line| line["step"] == step), "it came to step {step}");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Standard output and standard error of a run that ends well.
    pub(crate) fn succeed(&self, arguments: &str) -> (String, String) {
        let output = self.run(arguments);
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(output.status.success(), "{arguments}: {err}");
        (out, err)
    }
}
