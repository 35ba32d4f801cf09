//! A program that grades answers.
//!
//! It is started once for each step, reads a line of JSON for each answer on its standard input, to the end, and writes as many lines with a
//! number each, in the same order:
//!
//! ```text
//! {"question": "2+2?", "answer": "4", "completion": "It is 4.", "is_cut": false}     →     1
//! ```
//!
//! The line has all fields of the question's record. What the program writes to standard error goes to that of this one.
//!
//! It runs in a process group of its own, which is killed after [`Limits::seconds`], and may take [`Limits::memory`] of address space and as
//! many seconds of each processor. It can read and write what its user can: a grader is trusted as the training itself. One that runs code
//! of the model's has to confine that.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, prlimit};
use serde_json::Value;

/// Bounds of a program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Seconds of a call.
    pub seconds: f64,
    /// Bytes of address space.
    pub memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { seconds: 60.0, memory: 16 << 30 }
    }
}

/// A program that grades answers. See the [module](self).
#[derive(Debug, Clone)]
pub struct ProgramGrader {
    program: PathBuf,
    limits: Limits,
}

/// The longest output for each answer.
const LONGEST_LINE: u64 = 1 << 16;
/// How long what a program has written is read after its end.
const REST: Duration = Duration::from_secs(10);
/// Between two looks at the process.
const PAUSE: Duration = Duration::from_millis(5);

impl ProgramGrader {
    /// Names a program.
    ///
    /// # Errors
    /// There is no such file, or it may not be executed.
    pub fn new(program: &Path, limits: Limits) -> Result<Self, String> {
        let name = program.display();
        let metadata = std::fs::metadata(program).map_err(|cause| format!("the grader {name}: {cause}"))?;
        let is_executable = std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o111 != 0;
        if !metadata.is_file() || !is_executable {
            return Err(format!(
                "the grader {name} is no program that may be executed; `chmod +x` makes a script one"
            ));
        }
        let program =
            std::fs::canonicalize(program).map_err(|cause| format!("the grader {name}: {cause}"))?;
        Ok(Self { program, limits })
    }

    /// Returns the rewards of answers, one object each.
    ///
    /// # Errors
    /// A program that cannot be started, takes too long, fails, or writes something else than a finite number for each.
    pub fn grade(&self, answers: &[Value]) -> Result<Vec<f64>, String> {
        let name = self.program.display().to_string();
        let refuse = |what: String| format!("the grader {name} {what}");
        let mut child = Command::new(&self.program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|cause| refuse(format!("cannot be started: {cause}")))?;
        self.limit(&child);
        let lines: Vec<String> = answers.iter().map(|answer| format!("{answer}\n")).collect();
        let (mut input, output) = (child.stdin.take(), child.stdout.take());
        // A program may read all before it writes, or write before it has read all.
        thread::spawn(move || {
            // One that ends early is told by its status, or by its output.
            let _ = lines
                .iter()
                .try_for_each(|line| input.as_mut().map_or(Ok(()), |input| input.write_all(line.as_bytes())));
        });
        let most = LONGEST_LINE.saturating_mul(1 + answers.len() as u64);
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let lines: std::io::Result<Vec<String>> =
                output.map_or(Ok(Vec::new()), |output| BufReader::new(output.take(most)).lines().collect());
            let _ = sender.send(lines);
        });
        let status = self.wait(&mut child).map_err(&refuse)?;
        // A process that has left the group may still hold the output open.
        let lines = match receiver.recv_timeout(REST) {
            Ok(Ok(lines)) => lines,
            Ok(Err(cause)) => return Err(refuse(format!("writes no text: {cause}"))),
            Err(_) => return Err(refuse("has ended, and another process holds its output open".to_owned())),
        };
        if !status.success() {
            return Err(refuse(format!("has failed: {status}")));
        }
        if lines.len() != answers.len() {
            return Err(refuse(format!(
                "has written {} lines for {} answers; it must write a number for each, in their order",
                lines.len(),
                answers.len()
            )));
        }
        let number = |(at, line): (usize, &String)| match line.trim().parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(number),
            _ => Err(refuse(format!(
                "has written `{}` in line {}; expected a number",
                shortened(line),
                at + 1
            ))),
        };
        lines.iter().enumerate().map(number).collect()
    }

    /// Waits for the end, up to the limit, and ends what the program has started.
    fn wait(&self, child: &mut Child) -> Result<std::process::ExitStatus, String> {
        let until = Instant::now() + Duration::from_secs_f64(self.limits.seconds.clamp(0.0, 1e9));
        let result = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Ok(status),
                Ok(None) if Instant::now() < until => thread::sleep(PAUSE),
                Ok(None) => break Err(format!("has taken more than {} s", self.limits.seconds)),
                Err(cause) => break Err(format!("is lost: {cause}")),
            }
        };
        let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        if result.is_err() {
            let _ = child.wait();
        }
        result
    }

    /// Sets the limits of the process. One that has ended needs none.
    fn limit(&self, child: &Child) {
        let pid = Some(Pid::from_child(child));
        let most = |maximum: u64| Rlimit { current: Some(maximum), maximum: Some(maximum) };
        let _ = prlimit(pid, Resource::As, most(self.limits.memory));
        let _ = prlimit(pid, Resource::Cpu, most(self.limits.seconds.ceil().clamp(1.0, 1e9) as u64));
        let _ = prlimit(pid, Resource::Core, most(0));
    }
}

/// The beginning of a text, without control characters.
fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(60).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use serde_json::json;

    use super::*;

    fn graded(script: &str, seconds: f64, answers: usize) -> Result<Vec<f64>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grade.sh");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let answers: Vec<Value> =
            (0..answers).map(|number| json!({ "completion": format!("c{number}") })).collect();
        ProgramGrader::new(&path, Limits { seconds, ..Limits::default() }).unwrap().grade(&answers)
    }

    #[test]
    fn a_program_reads_answers_and_writes_rewards() {
        // More than a pipe holds, in both directions.
        let count = 20_000;
        let found = graded(
            "while read -r line; do case $line in *7*) echo 1;; *) echo -0.5;; esac; done",
            60.0,
            count,
        );
        let expected = |number: usize| if number.to_string().contains('7') { 1.0 } else { -0.5 };
        assert_eq!(found.unwrap(), (0..count).map(expected).collect::<Vec<f64>>());
    }

    #[test]
    fn a_program_that_fails_is_named_with_the_reason() {
        for (script, expected) in [
            ("exit 3", "has failed: exit status: 3"),
            ("cat > /dev/null; echo 1", "has written 1 lines for 2 answers"),
            ("cat > /dev/null; echo 1; echo many", "has written `many` in line 2; expected a number"),
            ("cat > /dev/null; echo 1; echo nan", "has written `nan` in line 2; expected a number"),
            ("sleep 30 & sleep 30", "has taken more than 0.3 s"),
        ] {
            let start = Instant::now();
            let error = graded(script, if script.contains("sleep") { 0.3 } else { 60.0 }, 2).unwrap_err();
            assert!(error.contains(expected) && error.contains("grade.sh"), "{error}");
            assert!(start.elapsed() < Duration::from_secs(20), "{script}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no.sh");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        let error = ProgramGrader::new(&path, Limits::default()).unwrap_err();
        assert!(error.contains("no program that may be executed"), "{error}");
        assert!(ProgramGrader::new(&folder.path().join("none"), Limits::default()).is_err());
    }
}
