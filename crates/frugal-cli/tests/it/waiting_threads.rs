//! How the program's OpenMP threads wait, as the OpenMP runtime itself prints its settings.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use runtime::wait_policy::{SPINS, VARIABLES};

/// The program with these variables alone of those that say how threads wait.
fn doctor(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(crate::program());
    command.args(["doctor", "--fast", "--offline"]).env_remove("OMP_NUM_THREADS");
    for name in VARIABLES {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).env("OMP_DISPLAY_ENV", "verbose");
    command
}

/// What the OpenMP runtime prints of `GOMP_SPINCOUNT`, and what the program says of waiting threads.
fn shown(mut command: Command) -> (String, String) {
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{err}");
    let spins = err.lines().find_map(|line| line.split_once("GOMP_SPINCOUNT = ")).map(|(_, spins)| spins);
    let said = out.lines().find_map(|line| line.strip_prefix("waiting threads"));
    (spins.unwrap().trim_matches('\'').to_owned(), said.unwrap().trim().to_owned())
}

#[test]
fn spinning_is_bounded_unless_a_person_says_otherwise() {
    let (spins, said) = shown(doctor(&[]));
    assert_eq!(spins, SPINS.to_string());
    assert!(said.starts_with(&format!("spin {SPINS} times, then sleep")), "{said}");

    let (spins, said) = shown(doctor(&[("OMP_WAIT_POLICY", "passive")]));
    assert_eq!((&*spins, &*said), ("0", "OMP_WAIT_POLICY=passive"));

    let (spins, said) = shown(doctor(&[("GOMP_SPINCOUNT", "77")]));
    assert_eq!((&*spins, &*said), ("77", "GOMP_SPINCOUNT=77"));

    // One thread waits for nobody: the program is not started anew.
    let (spins, said) = shown(doctor(&[("OMP_NUM_THREADS", "1")]));
    assert_ne!(spins, SPINS.to_string());
    assert!(said.starts_with("OpenMP's default"), "{said}");
}

#[test]
fn arguments_and_variables_are_kept() {
    let mut command = doctor(&[("EMPTY", "")]);
    command.args([OsStr::new("--folder"), OsStr::from_bytes(b"/no such \xff folder")]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("/no such \u{fffd} folder"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
