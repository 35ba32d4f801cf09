//! Two machines in one: network namespaces that a virtual cable joins, each with a name of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two machines, whose names are `node-0` and `node-1`. Dropped, they are gone, with what still runs on them.
#[derive(Debug)]
pub(crate) struct Machines {
    namespaces: [String; 2],
}

/// The end of the cable on each machine.
const INTERFACE: &str = "cable";

impl Machines {
    /// Makes them; `None`, and a line that says why, where the system does not let this process.
    ///
    /// # Panics
    /// If the system has let it make a machine, and then no cable.
    pub(crate) fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let namespaces = [0, 1].map(|node| format!("frugal-{}-{number}-{node}", std::process::id()));
        for (made, namespace) in namespaces.iter().enumerate() {
            if let Err(why) = ip(&["netns", "add", namespace]) {
                eprintln!("skipped: no network namespaces: {why}");
                if made > 0 {
                    let _ = ip(&["netns", "delete", &namespaces[0]]);
                }
                return None;
            }
        }
        let [first, second] = &namespaces;
        let machines = Self { namespaces: namespaces.clone() };
        let pair = [
            "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns",
            second,
        ];
        if let Err(why) = ip(&pair) {
            eprintln!("skipped: no virtual cables: {why}");
            return None;
        }
        for node in [0, 1] {
            let address = format!("{}/24", Self::address(node));
            for words in [
                &["address", "add", &address, "dev", INTERFACE][..],
                &["link", "set", INTERFACE, "up"],
                &["link", "set", "lo", "up"],
            ] {
                machines.ip(node, words).expect("a network");
            }
        }
        let ran = said(&mut machines.command(1, Path::new("true")));
        if let Err(why) = ran {
            eprintln!("skipped: no names of machines: {why}");
            return None;
        }
        Some(machines)
    }

    /// Returns the address of a machine, as the other reaches it.
    pub(crate) fn address(node: usize) -> String {
        format!("10.77.0.{}", node + 1)
    }

    /// Returns a command that runs on a machine.
    pub(crate) fn command(&self, node: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        let named = format!("hostname node-{node} && exec \"$0\" \"$@\"");
        command
            .args(["netns", "exec", &self.namespaces[node], "unshare", "--uts", "sh", "-c", &named])
            .arg(program);
        command
    }

    /// Pulls the cable, or plugs it in again.
    ///
    /// # Panics
    /// If the system refuses.
    pub(crate) fn plug(&self, is_in: bool) {
        self.ip(1, &["link", "set", INTERFACE, if is_in { "up" } else { "down" }]).expect("a cable");
    }

    /// Makes the cable slow or lossy, in both directions, by the words of `tc`'s `netem`. Returns whether the system can.
    ///
    /// # Panics
    /// If it can on one machine alone.
    pub(crate) fn degrade(&self, words: &[&str]) -> bool {
        let set = |node: usize| {
            let mut tc = Command::new("ip");
            tc.args([
                "netns",
                "exec",
                &self.namespaces[node],
                "tc",
                "qdisc",
                "replace",
                "dev",
                INTERFACE,
                "root",
                "netem",
            ]);
            said(tc.args(words))
        };
        match (set(0), set(1)) {
            (Ok(()), Ok(())) => true,
            (Err(why), Err(_)) => {
                eprintln!("skipped: no slow cable: {why}");
                false
            }
            (first, second) => panic!("{first:?}, {second:?}"),
        }
    }

    fn ip(&self, node: usize, words: &[&str]) -> Result<(), String> {
        let mut all = vec!["-netns", &self.namespaces[node]];
        all.extend(words);
        ip(&all)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            let pids = Command::new("ip").args(["netns", "pids", namespace]).output();
            for pid in pids.iter().flat_map(|pids| {
                String::from_utf8_lossy(&pids.stdout)
                    .into_owned()
                    .lines()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            }) {
                let _ = Command::new("kill").args(["-9", &pid]).stderr(Stdio::null()).status();
            }
            let _ = ip(&["netns", "delete", namespace]);
        }
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    said(Command::new("ip").args(words))
}

/// Runs a command, and returns what it says if it fails.
fn said(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|cause| format!("{command:?}: {cause}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}
