//! `frugal launch` on two machines: the same bits as in one process, and an end of all ranks when a machine or the network fails.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::network::{INTERFACE, Machines};
use crate::texts::write_texts;

/// Two launchers, one on each machine, with two ranks each. Each has an output folder of its own.
struct Launchers(Vec<Child>);

/// How a launcher has ended, and what it said.
struct End {
    status: ExitStatus,
    said: String,
}

fn training(data: &Path, out: &Path, more: &[&str]) -> Vec<String> {
    let data =
        ["train", "--data", data.to_str().unwrap(), "--width", "16", "--heads", "2", "--accumulation", "4"];
    let run = ["--log-every", "1", "--checkpoint-every", "2", "--out", out.to_str().unwrap()];
    data.iter().chain(&run).chain(more).map(|word| (*word).to_owned()).collect()
}

impl Launchers {
    fn start(
        machines: &Machines,
        nodes: &[usize],
        options: &[&str],
        words: impl Fn(usize) -> Vec<String>,
    ) -> Self {
        let launch = |node: &usize| {
            let mut command = machines.command(*node, crate::program().as_ref());
            command.args([
                "launch",
                "--nodes",
                "2",
                "--node-rank",
                &node.to_string(),
                "--master",
                &Machines::address(0),
            ]);
            command.args(["-n", "2"]).args(options).arg("--").args(words(*node));
            command.env("OMP_NUM_THREADS", "1").env_remove("GLOO_SOCKET_IFNAME");
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        Self(nodes.iter().map(launch).collect())
    }

    /// Waits for all, at most this long.
    #[track_caller]
    fn end(mut self, limit: Duration) -> Vec<End> {
        let until = Instant::now() + limit;
        while self.0.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
            if Instant::now() > until {
                let mut said = Vec::new();
                for child in &mut self.0 {
                    let _ = child.kill();
                    let mut text = String::new();
                    let _ = child.stderr.take().unwrap().read_to_string(&mut text);
                    said.push(text);
                }
                panic!("no end after {limit:?}: {said:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = self.0.into_iter().map(|child| {
            let output = child.wait_with_output().unwrap();
            let [out, error] =
                [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            End { status: output.status, said: error + &out }
        });
        ended.collect()
    }
}

fn files(out: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let newest = out.join("checkpoints/step-000000000003");
    let read = |path: std::path::PathBuf| {
        std::fs::read(&path).unwrap_or_else(|cause| panic!("{}: {cause}", path.display()))
    };
    let losses = String::from_utf8(read(out.join("losses.jsonl"))).unwrap();
    let losses = losses.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {}\n", line["step"], line["loss"])
    });
    let mut files = BTreeMap::from([("losses", losses.collect::<String>().into_bytes())]);
    for name in ["model.safetensors", "optimizer.safetensors"] {
        files.insert(name, read(newest.join(name)));
    }
    files
}

/// Two machines; `None`, and a line that says why, where the system does not let this process make them.
fn machines() -> Option<Machines> {
    Machines::new().inspect_err(|why| eprintln!("skipped: {why}")).ok()
}

/// Pulls the cable, or plugs it in again.
fn plug(machines: &Machines, is_in: bool) {
    machines.ip(1, &["link", "set", INTERFACE, if is_in { "up" } else { "down" }]).unwrap();
}

/// Drops one in 50 of the packets that arrive on machine 1, by its packet filter: kernels have that more often than `netem`.
fn lose_packets(machines: &Machines) -> Result<(), String> {
    let rules = format!(
        "add table inet loss; add chain inet loss arriving {{ type filter hook input priority 0; }}; \
         add rule inet loss arriving iifname {INTERFACE} numgen random mod 50 == 0 drop"
    );
    let output = machines.command(1, "nft".as_ref()).arg(rules).output();
    let output = output.map_err(|cause| cause.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

/// A folder with data, and one for each training.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_texts(folder.path());
    folder
}

fn alone(folder: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let out = folder.join("alone");
    let words = training(&folder.join("store"), &out, &["--steps", "3"]);
    let output = Command::new(crate::program()).args(&words).env("OMP_NUM_THREADS", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    files(&out)
}

/// Trains on both machines. Rank 0 alone writes, so only the first has a folder.
fn over_machines(
    machines: &Machines,
    folder: &Path,
    name: &str,
    more: &[&str],
) -> BTreeMap<&'static str, Vec<u8>> {
    let out = |node: usize| folder.join(format!("{name}-{node}"));
    let words =
        |node: usize| training(&folder.join("store"), &out(node), &[&["--steps", "3"], more].concat());
    for (node, end) in
        Launchers::start(machines, &[0, 1], &[], words).end(Duration::from_secs(120)).iter().enumerate()
    {
        assert!(end.status.success(), "{name}, machine {node}: {}", end.said);
    }
    assert!(!out(1).exists(), "rank 2 has written");
    files(&out(0))
}

#[test]
fn two_machines_train_to_the_bits_of_one_process() {
    let Some(machines) = machines() else { return };
    let folder = folder();
    let alone = alone(folder.path());
    let stages = [
        &["--zero-stage", "1"][..],
        &["--zero-stage", "2"],
        &["--zero-stage", "3"],
        &["--zero-stage", "3", "--replicas", "2"],
    ];
    for stage in stages {
        assert!(over_machines(&machines, folder.path(), &stage.concat(), stage) == alone, "{stage:?}");
    }
    let slow = ["netem", "delay", "10ms", "2ms", "loss", "1%"];
    // A step sends 100 kB.
    let narrow = ["tbf", "rate", "20mbit", "burst", "16kb", "latency", "100ms"];
    for (name, words) in [("slow and lossy", &slow[..]), ("narrow", &narrow)] {
        match machines.queue(words) {
            Ok(()) => {
                let over = over_machines(&machines, folder.path(), name, &["--zero-stage", "3"]);
                assert!(over == alone, "over a {name} cable");
            }
            Err(why) => eprintln!("skipped: no {name} cable: {why}"),
        }
    }
    match lose_packets(&machines) {
        Ok(()) => {
            let over = over_machines(&machines, folder.path(), "lossy", &["--zero-stage", "3"]);
            assert!(over == alone, "over a lossy cable");
        }
        Err(why) => eprintln!("skipped: no lossy cable: {why}"),
    }
}

/// Starts a training without an end, and waits until it has made some steps.
fn endless(machines: &Machines, folder: &Path, options: &[&str]) -> Launchers {
    let out = |node: usize| folder.join(format!("endless-{node}"));
    // Of the one before.
    let _ = std::fs::remove_dir_all(out(0));
    let words = |node: usize| {
        training(&folder.join("store"), &out(node), &["--steps", "1000000", "--zero-stage", "3"])
    };
    let mut launchers = Launchers::start(machines, &[0, 1], options, words);
    wait_for_steps(&mut launchers, folder, 5);
    launchers
}

/// Waits for so many steps more.
#[track_caller]
fn wait_for_steps(launchers: &mut Launchers, folder: &Path, more: usize) {
    let steps = || {
        std::fs::read_to_string(folder.join("endless-0/losses.jsonl")).map_or(0, |text| text.lines().count())
    };
    let (wanted, until) = (steps() + more, Instant::now() + Duration::from_secs(60));
    while steps() < wanted {
        let ended = launchers.0.iter_mut().any(|child| child.try_wait().unwrap().is_some());
        if ended || Instant::now() > until {
            let mut said = String::new();
            let _ = launchers.0[0].kill();
            let _ = launchers.0[0].stderr.take().unwrap().read_to_string(&mut said);
            panic!("no more steps: {said}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The ranks that a launcher has started; `ip`, `unshare` and the shell have become the launcher.
fn ranks(launcher: &Child) -> Vec<String> {
    let id = launcher.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    children.split_whitespace().map(str::to_owned).collect()
}

fn kill(process: &str) {
    assert!(Command::new("kill").args(["-9", process]).status().unwrap().success());
}

#[test]
fn when_a_rank_a_machine_or_the_cable_is_gone_all_ranks_end_and_name_it() {
    let Some(machines) = machines() else { return };
    let folder = folder();

    let launchers = endless(&machines, folder.path(), &[]);
    kill(&ranks(&launchers.0[1])[0]);
    let ends = launchers.end(Duration::from_secs(30));
    assert!(ends[1].said.contains("error: rank 2 of 4 was ended by signal 9"), "{}", ends[1].said);
    assert!(ends[0].said.contains("with rank 2 on node-1: "), "{}", ends[0].said);

    // A launcher's ranks outlive it if it is killed, so the machine's are killed too.
    let mut launchers = endless(&machines, folder.path(), &[]);
    let lost = ranks(&launchers.0[1]);
    launchers.0[1].kill().unwrap();
    lost.iter().for_each(|process| kill(process));
    let ends = launchers.end(Duration::from_secs(30));
    assert_eq!(ends[0].status.code(), Some(1));
    assert!(ends[0].said.contains(" on node-1: "), "{}", ends[0].said);

    // A cable that is back in time is nothing; then it is not.
    let mut launchers = endless(&machines, folder.path(), &["--timeout", "8"]);
    plug(&machines, false);
    std::thread::sleep(Duration::from_secs(2));
    plug(&machines, true);
    wait_for_steps(&mut launchers, folder.path(), 20);
    plug(&machines, false);
    let ends = launchers.end(Duration::from_secs(8 + 20));
    plug(&machines, true);
    for (node, end) in ends.iter().enumerate() {
        assert_eq!(end.status.code(), Some(1), "{}", end.said);
        let other = format!(" on node-{}: ", 1 - node);
        assert!(end.said.contains(&other), "machine {node}: {}", end.said);
    }
}

#[test]
fn a_machine_that_does_not_come_is_waited_for_no_longer_than_the_timeout() {
    let Some(machines) = machines() else { return };
    let folder = folder();
    let words = |node: usize| {
        training(&folder.path().join("store"), &folder.path().join(format!("out-{node}")), &["--steps", "3"])
    };
    for node in [0, 1] {
        let ends =
            Launchers::start(&machines, &[node], &["--timeout", "3"], words).end(Duration::from_secs(30));
        let said = &ends[0].said;
        let expected = match node {
            0 => "ranks 2, 3 of 4 did not come for ",
            _ => "the machine of rank 0 was not reached at 10.77.0.1:29500 for 3s (",
        };
        assert!(said.contains(expected), "machine {node}: {said}");
        // No lines of C++.
        assert!(!said.contains("frame #"), "machine {node}: {said}");
    }
}

#[test]
fn a_resume_where_a_machine_lacks_the_folder_is_refused_by_name() {
    let Some(machines) = machines() else { return };
    let folder = folder();
    let out = |node: usize| folder.path().join(format!("run-{node}"));
    let run = |steps: &'static str| {
        let words =
            |node: usize| training(&folder.path().join("store"), &out(node), &["--steps", steps, "--resume"]);
        Launchers::start(&machines, &[0, 1], &[], words).end(Duration::from_secs(120))
    };
    assert!(run("2").iter().all(|end| end.status.success()));
    let ends = run("4");
    for end in &ends {
        assert!(!end.status.success(), "{}", end.said);
    }
    let told = "in the output folder (each machine needs a copy)` is 2 on rank 0 and none on rank ";
    assert!(ends[0].said.contains(told), "{}", ends[0].said);
    // With the folder it goes on.
    assert!(Command::new("cp").arg("-r").args([out(0), out(1)]).status().unwrap().success());
    for end in run("4") {
        assert!(end.status.success(), "{}", end.said);
    }
}
