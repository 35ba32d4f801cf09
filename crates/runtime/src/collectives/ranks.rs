//! The ranks of this machine, as processes: what `frugal launch`, tests and measurements start.
//!
//! Each process gets torchrun's environment variables ([`Launch`](super::Launch)), and rank 0 the listening socket of the store, so that
//! no other process can take its port. Of several machines each starts its own ranks, as many as the others. A rank is a process group of its own: a Ctrl-C in the terminal reaches the launcher alone, and
//! what a rank has started ends with it.
//!
//! ```
//! use std::process::Command;
//! use std::time::Duration;
//!
//! use runtime::collectives::ranks::{Progress, Ranks, RanksConfig};
//!
//! let options = RanksConfig { ranks: 2, ..RanksConfig::default() };
//! let mut ranks = Ranks::start(&options, |_| {
//!     let mut command = Command::new("sh");
//!     command.args(["-c", "echo $RANK of $WORLD_SIZE"]);
//!     command
//! }, |rank, _, line| assert_eq!(line, format!("{rank} of 2")))?;
//! assert_eq!(ranks.wait(Duration::from_secs(60))?, Progress::Done);
//! # Ok::<(), runtime::Error>(())
//! ```

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::Machines;
use super::launch::LISTENER;
use crate::error::{Error, Result};
use crate::signals::not_ignored;
#[cfg(target_os = "linux")]
use crate::sys::collectives::end_with_parent;
use crate::sys::collectives::inherit;

/// How often processes are asked whether they have ended.
const PAUSE: Duration = Duration::from_millis(10);
/// Which of libtorch's C++ messages are printed.
const LOG_LEVEL: &str = "TORCH_CPP_LOG_LEVEL";
/// How long the rest of the output may take once a process has ended.
const FLUSH: Duration = Duration::from_secs(1);

/// Which processes are started.
#[derive(Clone, Debug)]
pub struct RanksConfig {
    /// Number of processes on this machine.
    pub ranks: usize,
    /// The machines of the run, if there are several.
    pub machines: Option<Machines>,
    /// How often they were started before.
    pub restart_count: u64,
    /// The run's name; that of [`Machines`] wins.
    pub run_id: String,
}

impl Default for RanksConfig {
    fn default() -> Self {
        Self { ranks: 1, machines: None, restart_count: 0, run_id: "none".to_owned() }
    }
}

/// One of a process's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Standard output.
    Standard,
    /// Standard error.
    Error,
}

/// How far the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Some have not ended.
    Running,
    /// All have ended without an error.
    Done,
    /// A rank has failed; of several that did, the first that was seen.
    Failed {
        /// The rank.
        rank: usize,
        /// How it ended.
        status: ExitStatus,
    },
}

/// Receiver of each line of output.
type OnLine = Arc<dyn Fn(usize, Output, &str) + Send + Sync>;

/// Processes that run. Those that are left are killed when this is dropped.
#[derive(Debug)]
pub struct Ranks {
    /// The first rank of this machine.
    first: usize,
    running: Vec<Option<Child>>,
    failed: Option<(usize, ExitStatus)>,
    readers: Vec<JoinHandle<()>>,
}

impl Ranks {
    /// Starts a process for each rank: `command` gives its program and arguments, `line` receives each line that it prints.
    ///
    /// `OMP_NUM_THREADS` is set to an equal share of the processors, unless the environment has it.
    ///
    /// # Errors
    /// No ranks; a program that cannot be started; no socket.
    pub fn start(
        options: &RanksConfig,
        mut command: impl FnMut(usize) -> Command,
        line: impl Fn(usize, Output, &str) + Send + Sync + 'static,
    ) -> Result<Self> {
        let invalid = |reason: String| Error::invalid("ranks", reason);
        if options.ranks == 0 {
            return Err(invalid("0 ranks; expected at least 1".to_owned()));
        }
        let Store { first, world, address, port, run_id, listener } = Store::new(options)?;
        let threads = thread::available_parallelism().map_or(1, |cores| (cores.get() / options.ranks).max(1));
        let line: OnLine = Arc::new(line);
        let mut ranks = Self { first, running: Vec::new(), failed: None, readers: Vec::new() };
        for local_rank in 0..options.ranks {
            let rank = first + local_rank;
            let mut command = command(rank);
            command
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", local_rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("LOCAL_WORLD_SIZE", options.ranks.to_string())
                .env("MASTER_ADDR", address)
                .env("MASTER_PORT", port.to_string())
                .env("TORCHELASTIC_RESTART_COUNT", options.restart_count.to_string())
                .env("TORCHELASTIC_RUN_ID", run_id)
                .env_remove("TORCHELASTIC_USE_AGENT_STORE")
                .env_remove(LISTENER)
                .process_group(0)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            if std::env::var_os("OMP_NUM_THREADS").is_none() {
                command.env("OMP_NUM_THREADS", threads.to_string());
            }
            // c10d's warnings are of names of sockets and of attempts that follow one another.
            if std::env::var_os(LOG_LEVEL).is_none() {
                command.env(LOG_LEVEL, "ERROR");
            }
            #[cfg(target_os = "linux")]
            end_with_parent(&mut command);
            if let Some(listener) = listener.as_ref().filter(|_| rank == 0) {
                // By this process alone, whatever other threads start meanwhile.
                command.env(LISTENER, listener.as_raw_fd().to_string());
                inherit(&mut command, listener);
            }
            let mut child =
                command.spawn().map_err(|cause| Error::Io { path: command.get_program().into(), cause })?;
            let (output, error) = (child.stdout.take(), child.stderr.take());
            ranks.readers.extend(output.map(|pipe| read(rank, Output::Standard, pipe, line.clone())));
            ranks.readers.extend(error.map(|pipe| read(rank, Output::Error, pipe, line.clone())));
            ranks.running.push(Some(child));
        }
        Ok(ranks)
    }

    /// Returns how far the ranks are, without waiting.
    ///
    /// # Errors
    /// The system does not say.
    pub fn poll(&mut self) -> Result<Progress> {
        for (local_rank, slot) in self.running.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            let rank = self.first + local_rank;
            let ended = child.try_wait();
            let ended = ended
                .map_err(|cause| Error::invalid("ranks", format!("waiting for rank {rank}: {cause}")))?;
            if let Some(status) = ended {
                // What the rank has started goes with it.
                let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
                *slot = None;
                if !status.success() && self.failed.is_none() {
                    self.failed = Some((rank, status));
                }
            }
        }
        Ok(match self.failed {
            Some((rank, status)) => Progress::Failed { rank, status },
            None if self.have_ended() => Progress::Done,
            None => Progress::Running,
        })
    }

    /// Waits until a rank has failed or all have ended, for at most `limit`. Output of ranks that have ended has been received then.
    ///
    /// # Errors
    /// Errors of [`Ranks::poll`].
    pub fn wait(&mut self, limit: Duration) -> Result<Progress> {
        let until = Instant::now() + limit;
        loop {
            let progress = self.poll()?;
            if progress == Progress::Done {
                self.flush();
            }
            if progress != Progress::Running || Instant::now() >= until {
                return Ok(progress);
            }
            thread::sleep(PAUSE);
        }
    }

    /// Returns the process number of a rank, while it runs.
    pub fn process(&self, rank: usize) -> Option<u32> {
        self.running.get(rank.checked_sub(self.first)?)?.as_ref().map(Child::id)
    }

    /// Returns whether all ranks have ended, as far as [`Ranks::poll`] has seen.
    pub fn have_ended(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    /// Sends every rank that runs the signal of Ctrl-C; SIGTERM if this process ignores that one, because the ranks then do too.
    pub fn interrupt(&self) {
        let is_ignored = not_ignored(&[Signal::INT.as_raw()]).is_empty();
        self.signal(if is_ignored { Signal::TERM } else { Signal::INT });
    }

    /// Kills every rank that runs, with what it has started.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    /// Waits until all ranks have ended; kills those that run after `patience`.
    ///
    /// # Errors
    /// Errors of [`Ranks::poll`].
    pub fn end(&mut self, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        loop {
            self.poll()?;
            if self.have_ended() {
                self.flush();
                return Ok(());
            }
            if Instant::now() >= until {
                self.kill();
            }
            thread::sleep(PAUSE);
        }
    }

    fn signal(&self, signal: Signal) {
        for child in self.running.iter().flatten() {
            // It may have ended meanwhile.
            let _ = kill_process_group(Pid::from_child(child), signal);
        }
    }

    /// Waits for the rest of the output. A process that left its group may hold it open, so not for ever.
    fn flush(&mut self) {
        let until = Instant::now() + FLUSH;
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for mut child in self.running.drain(..).flatten() {
            let _ = child.wait();
        }
    }
}

/// Where the ranks meet.
struct Store<'a> {
    first: usize,
    world: usize,
    address: &'a str,
    port: u16,
    run_id: &'a str,
    /// Of the machine that has rank 0.
    listener: Option<TcpListener>,
}

impl<'a> Store<'a> {
    fn new(options: &'a RanksConfig) -> Result<Self> {
        let RanksConfig { ranks, machines, run_id, .. } = options;
        let no_socket =
            |reason: String| Error::invalid("ranks", format!("no socket for the store: {reason}"));
        let Some(Machines { count, rank, master: (address, port), run_id }) = machines else {
            let listener = TcpListener::bind("127.0.0.1:0").map_err(|cause| no_socket(cause.to_string()))?;
            let port = listener.local_addr().map_err(|cause| no_socket(cause.to_string()))?.port();
            return Ok(Self {
                first: 0,
                world: *ranks,
                address: "127.0.0.1",
                port,
                run_id,
                listener: Some(listener),
            });
        };
        if rank >= count {
            return Err(Error::invalid(
                "ranks",
                format!("there is no machine {rank} of {count}; the first is 0"),
            ));
        }
        let listen = || {
            let own = (address.as_str(), 0);
            TcpListener::bind(own).map_err(|cause| {
                no_socket(format!(
                    "machine 0 has the address {address}, which this one has not ({cause}); give this machine its own number, or correct \
                     the address"
                ))
            })?;
            let everywhere =
                TcpListener::bind(("::", *port)).or_else(|_| TcpListener::bind(("0.0.0.0", *port)));
            everywhere
                .map_err(|cause| no_socket(format!("port {port}: {cause}; name another on all machines")))
        };
        let listener = if *rank == 0 { Some(listen()?) } else { None };
        Ok(Self { first: rank * ranks, world: count * ranks, address, port: *port, run_id, listener })
    }
}

/// Returns how a process ended, in words.
pub fn ending(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

fn read(rank: usize, output: Output, pipe: impl Read + Send + 'static, line: OnLine) -> JoinHandle<()> {
    thread::spawn(move || {
        for bytes in BufReader::new(pipe).split(b'\n') {
            let Ok(bytes) = bytes else { return };
            line(rank, output, &String::from_utf8_lossy(&bytes));
        }
    })
}
