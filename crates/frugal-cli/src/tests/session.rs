//! One process for the commands of many tests, because the start of the program takes a third of a second.

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use report::cli::{Failure, error_line};

use super::Tiny;

/// The environment variable of the process that runs commands.
const VARIABLE: &str = "FRUGAL_TEST_SESSION";
/// The line after what a command prints; on standard output the status follows.
const END: &str = "\u{1e}the command has ended ";

/// The process that runs the commands of all sessions; it ends when its standard input is closed.
static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// A tiny model's folder in which commands run one after another as the program runs them, in a process of this executable.
pub(super) struct Session {
    tiny: Tiny,
}

struct Process {
    child: Child,
    commands: ChildStdin,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
}

/// How a command has ended.
pub(super) struct Ended {
    pub(super) status: i32,
    pub(super) out: String,
    pub(super) err: String,
}

impl Deref for Session {
    type Target = Tiny;

    fn deref(&self) -> &Tiny {
        &self.tiny
    }
}

impl Session {
    pub(super) fn new() -> Self {
        Self { tiny: Tiny::new() }
    }

    /// Runs a command, its arguments between blanks.
    #[track_caller]
    pub(super) fn run(&self, arguments: &str) -> Ended {
        self.run_words(&arguments.split_whitespace().collect::<Vec<_>>())
    }

    #[track_caller]
    pub(super) fn run_words(&self, words: &[&str]) -> Ended {
        let mut shared = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        // A process in which a command panics is not used again.
        let mut process = shared.take().unwrap_or_else(Process::start);
        let line = serde_json::to_string(&(self.tiny.path(""), words)).unwrap();
        writeln!(process.commands, "{line}").unwrap();
        let ended = process.ended();
        *shared = Some(process);
        ended
    }

    /// Runs a command that fails; returns what it says.
    #[track_caller]
    pub(super) fn fail(&self, arguments: &str) -> String {
        let ended = self.run(arguments);
        assert_ne!(ended.status, 0, "frugal {arguments} goes: {}{}", ended.out, ended.err);
        ended.err
    }

    /// Standard output and standard error of a command that ends well.
    #[track_caller]
    pub(super) fn succeed(&self, arguments: &str) -> (String, String) {
        let Ended { status, out, err } = self.run(arguments);
        assert_eq!(status, 0, "{arguments}: {err}");
        (out, err)
    }
}

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["tests::session::the_process_of_all_sessions", "--exact", "--nocapture"]);
        // With several threads the harness prints a line of its own after 60 seconds.
        command.arg("--test-threads=1");
        // As for a process of the program; the caches are in the current folder.
        command.env(VARIABLE, "1").env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1");
        // `--device auto` is the CPU, whose bits the tests compare.
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.env("HF_HUB_CACHE", "no-cache").env("FRUGAL_CACHE", "cache");
        // An export says the same wherever llama.cpp is installed.
        command.env("FRUGAL_PYTHON", "no-python");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let err = BufReader::new(child.stderr.take().unwrap());
        let mut process = Self { child, commands, out, err };
        // What the harness prints at the start.
        process.ended();
        process
    }

    #[track_caller]
    fn ended(&mut self) -> Ended {
        let (out, status) = until_end(&mut self.out);
        let (err, _) = until_end(&mut self.err);
        let Ok(status) = status.trim().parse() else {
            panic!("the process of the sessions has ended with {:?}: {out}{err}", self.child.wait());
        };
        Ended { status, out, err }
    }
}

/// What is printed before the line of the end, and the rest of that line.
fn until_end(from: &mut impl BufRead) -> (String, String) {
    let mut text = String::new();
    loop {
        let start = text.len();
        if from.read_line(&mut text).unwrap() == 0 {
            return (text, String::new());
        }
        if let Some(rest) = text[start..].strip_prefix(END) {
            let rest = rest.to_owned();
            // And the line break before it.
            text.truncate(start.saturating_sub(1));
            return (text, rest);
        }
    }
}

/// The process of the sessions runs this test alone.
#[test]
#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "what the process prints is what a session reads"
)]
fn the_process_of_all_sessions() {
    if std::env::var_os(VARIABLE).is_none() {
        return;
    }
    let end = |status: i32| {
        println!("\n{END}{status}");
        eprintln!("\n{END}");
    };
    end(0);
    for line in std::io::stdin().lines() {
        let (folder, words): (PathBuf, Vec<String>) = serde_json::from_str(&line.unwrap()).unwrap();
        std::env::set_current_dir(folder).unwrap();
        let words = std::iter::once("frugal".to_owned()).chain(words);
        end(match crate::parse(words) {
            Err(error) => {
                eprint!("{error}");
                error.exit_code()
            }
            Ok(cli) => crate::run(&cli).map_or_else(
                |error| {
                    eprintln!("{}", error_line(&error));
                    Failure::status_of(&error).into()
                },
                |()| 0,
            ),
        });
    }
}
