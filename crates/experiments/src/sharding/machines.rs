//! Two machines in one: network namespaces that a virtual cable joins, each with a name of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The end of the cable on each machine.
pub(crate) const INTERFACE: &str = "cable";

/// Two machines, whose names are `node-0` and `node-1`. Dropped, they are gone, with what still runs on them.
#[derive(Debug)]
pub(crate) struct Machines {
    namespaces: [String; 2],
}

impl Machines {
    /// Makes them.
    ///
    /// # Errors
    /// What the system says where it does not let this process: it takes Linux, iproute2, and the rights of an administrator.
    pub(crate) fn new() -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let namespaces = [0, 1].map(|node| format!("frugal-{}-{number}-{node}", std::process::id()));
        let [first, second] = &namespaces;
        let add = |namespace: &str| {
            ip(&["netns", "add", namespace]).map_err(|why| format!("no network namespaces: {why}"))
        };
        add(first)?;
        // From here on what was made is removed with it.
        let machines = Self { namespaces: namespaces.clone() };
        add(second)?;
        let pair = [
            "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns",
            second,
        ];
        ip(&pair).map_err(|why| format!("no virtual cables: {why}"))?;
        for node in [0, 1] {
            let address = format!("{}/24", Self::address(node));
            machines.ip(node, &["address", "add", &address, "dev", INTERFACE])?;
            machines.ip(node, &["link", "set", INTERFACE, "up"])?;
            machines.ip(node, &["link", "set", "lo", "up"])?;
        }
        said(&mut machines.command(1, Path::new("true")))
            .map_err(|why| format!("no names of machines: {why}"))?;
        Ok(machines)
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

    /// Replaces the queue in front of the cable, in both directions, by the one that these words of `tc` describe, such as `netem delay
    /// 10ms` or `tbf rate 1gbit burst 256kb latency 50ms`.
    ///
    /// # Errors
    /// What the system says, as where its kernel lacks that kind of queue.
    pub(crate) fn queue(&self, words: &[&str]) -> Result<(), String> {
        for namespace in &self.namespaces {
            let mut tc = Command::new("ip");
            tc.args(["netns", "exec", namespace, "tc", "qdisc", "replace", "dev", INTERFACE, "root"]);
            said(tc.args(words))?;
        }
        Ok(())
    }

    /// Runs `ip` with these words on a machine.
    ///
    /// # Errors
    /// What it says if it fails.
    pub(crate) fn ip(&self, node: usize, words: &[&str]) -> Result<(), String> {
        let mut all = vec!["-netns", &self.namespaces[node]];
        all.extend(words);
        ip(&all)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            let pids = Command::new("ip").args(["netns", "pids", namespace]).stderr(Stdio::null()).output();
            let pids =
                pids.map(|pids| String::from_utf8_lossy(&pids.stdout).into_owned()).unwrap_or_default();
            for pid in pids.lines() {
                let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
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
