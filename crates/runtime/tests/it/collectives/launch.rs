//! torchrun's variables, and what is said where they are not right.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use expect_test::{Expect, expect};
use runtime::collectives::{Launch, Machines, Store};

const ALL: [(&str, &str); 9] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node-0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RESTART_COUNT", "2"),
    ("TORCHELASTIC_RUN_ID", "run"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

/// The variables of torchrun, some of them changed or, where the value is empty, missing.
fn read(changes: &[(&str, &str)]) -> runtime::Result<Option<Launch>> {
    Launch::read(|name| {
        let changed = changes.iter().find(|(changed, _)| *changed == name);
        let value = changed.or_else(|| ALL.iter().find(|(known, _)| *known == name));
        value.map(|(_, value)| (*value).to_owned()).filter(|value| !value.is_empty())
    })
}

#[test]
fn the_variables_of_torchrun_are_read() {
    let launch = read(&[]).unwrap().unwrap();
    assert_eq!((launch.rank, launch.world_size), (3, 4));
    assert_eq!((launch.local_rank, launch.local_world_size), (1, 2));
    assert_eq!((&*launch.master_address, launch.master_port), ("node-0", 29500));
    assert_eq!((launch.restart_count, &*launch.run_id, launch.agent_store), (2, "run", true));
    assert!(!launch.is_local());
    let plain = [
        ("TORCHELASTIC_RESTART_COUNT", ""),
        ("TORCHELASTIC_RUN_ID", ""),
        ("TORCHELASTIC_USE_AGENT_STORE", ""),
    ];
    let launch = read(&plain).unwrap().unwrap();
    assert_eq!((launch.restart_count, &*launch.run_id, launch.agent_store), (0, "none", false));
    assert_eq!(read(&[("RANK", ""), ("WORLD_SIZE", "")]).unwrap(), None);
}

#[test]
fn a_variable_that_is_missing_or_invalid_is_named() {
    let check = |changes: &[(&str, &str)], expected: Expect| {
        expected.assert_eq(&read(changes).unwrap_err().to_string());
    };
    check(
        &[("MASTER_ADDR", "")],
        expect![
            "launch: MASTER_ADDR is not set, but the process has a rank; start it with `frugal launch` or torchrun, which set all of their variables"
        ],
    );
    check(
        &[("WORLD_SIZE", "")],
        expect![
            "launch: WORLD_SIZE is not set, but the process has a rank; start it with `frugal launch` or torchrun, which set all of their variables"
        ],
    );
    check(&[("RANK", "-1")], expect![[r#"launch: RANK is "-1"; expected a number"#]]);
    check(&[("RANK", "4")], expect!["launch: RANK is 4; expected a number below WORLD_SIZE, 4"]);
    check(
        &[("LOCAL_RANK", "2")],
        expect!["launch: LOCAL_RANK is 2; expected a number below LOCAL_WORLD_SIZE, 2"],
    );
    check(
        &[("LOCAL_WORLD_SIZE", "5")],
        expect!["launch: LOCAL_WORLD_SIZE is 5; expected at most WORLD_SIZE, 4"],
    );
    check(&[("MASTER_PORT", "70000")], expect![[r#"launch: MASTER_PORT is "70000"; expected a port"#]]);
    check(
        &[("TORCHELASTIC_RESTART_COUNT", "x")],
        expect![[r#"launch: TORCHELASTIC_RESTART_COUNT is "x"; expected a number"#]],
    );
}

/// The variables of the sixth task of a step with two tasks on each of three machines, as `srun` sets them.
const STEP: [(&str, &str); 9] = [
    ("SLURM_JOB_ID", "1234567"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_TASKS", "6"),
    ("SLURM_STEP_NUM_NODES", "3"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x3)"),
    ("SLURM_STEP_NODELIST", "node[07-08],node12"),
    ("SLURM_PROCID", "5"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "2"),
];

fn of_step(name: &str, changes: &[(&str, &str)]) -> Option<String> {
    let changed = changes.iter().find(|(changed, _)| *changed == name);
    let value = changed.or_else(|| STEP.iter().find(|(known, _)| *known == name));
    value.map(|(_, value)| (*value).to_owned()).filter(|value| !value.is_empty())
}

#[test]
fn a_task_of_slurm_has_its_place_unless_a_launcher_gives_another() {
    let read = |changes: &[(&str, &str)]| Launch::read(|name| of_step(name, changes));
    let launch = read(&[]).unwrap().unwrap();
    assert_eq!((launch.rank, launch.world_size, launch.local_rank, launch.local_world_size), (5, 6, 1, 2));
    assert_eq!(
        (&*launch.master_address, launch.master_port, &*launch.run_id),
        ("node07", 24_567, "1234567.0")
    );
    let launch = read(&[("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "1234")]).unwrap().unwrap();
    assert_eq!((&*launch.master_address, launch.master_port), ("10.0.0.9", 1234));
    // A job's script is no task of a step, and a task alone has no others.
    assert_eq!(read(&[("SLURM_STEP_ID", "")]).unwrap(), None);
    assert_eq!(read(&[("SLURM_STEP_NUM_TASKS", "1")]).unwrap(), None);
    // What `frugal launch` and torchrun set wins.
    let torchrun = |name: &str| {
        let known = ALL.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        known.or_else(|| of_step(name, &[]))
    };
    assert_eq!(Launch::read(torchrun).unwrap().unwrap().rank, 3);
    let error = read(&[("SLURM_PROCID", "x")]).unwrap_err().to_string();
    assert_eq!(error, r#"launch: SLURM_PROCID is "x"; expected a number"#);
    let error = read(&[("SLURM_STEP_NODELIST", "")]).unwrap_err().to_string();
    assert_eq!(error, "launch: SLURM_STEP_NODELIST is not set, but SLURM_STEP_ID is");
}

#[test]
fn a_launcher_on_each_machine_of_a_step_knows_its_own() {
    let read = |changes: &[(&str, &str)]| Machines::of_slurm(|name| of_step(name, changes)).unwrap();
    assert_eq!(read(&[]), None);
    let (count, rank, master, run_id) = (3, 2, ("node07".to_owned(), 24_567), "1234567.0".to_owned());
    assert_eq!(read(&[("SLURM_STEP_NUM_TASKS", "3")]), Some(Machines { count, rank, master, run_id }));
    assert_eq!(read(&[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_STEP_NUM_NODES", "1")]), None);
}

/// Rank `rank` of two of a run at a port of this machine.
fn at(port: u16, rank: usize) -> Launch {
    let (port, rank) = (port.to_string(), rank.to_string());
    let variables = [
        ("RANK", &*rank),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", &*rank),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", &*port),
    ];
    let of =
        |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    Launch::read(of).unwrap().unwrap()
}

#[test]
fn a_rank_of_another_run_on_the_same_port_is_told_so() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let timeout = Duration::from_secs(20);
    let first = thread::spawn(move || Store::connect(&at(port, 0), timeout));
    let second = Store::connect(&at(port, 1), timeout).unwrap();
    let first = first.join().unwrap().unwrap();
    // Its rank 0 would find the port taken.
    let error = Store::connect(&at(port, 1), timeout).unwrap_err().to_string();
    assert_eq!(
        error.replace(&port.to_string(), "PORT"),
        "store: rank 1 of 2: another run has 127.0.0.1:PORT; give this one another port on all machines"
    );
    let error = Store::connect(&at(port, 0), timeout).unwrap_err().to_string();
    assert!(error.contains(&port.to_string()), "{error}");
    drop((second, first));
}
