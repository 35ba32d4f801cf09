//! `setup` as a process of its own, with a Python that installs a few empty files.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard};

/// Passes for cargo: `update` locks the given version, `metadata` names three packages; one of them links libtorch
/// by another. `no-network` makes it fail.
const CARGO: &str = r#"#!/bin/sh
echo "cargo $*" >> "$FAKE/calls-of-cargo"
case "$1" in
update)
    if [ -e "$FAKE/no-network" ]; then echo "error: no network" >&2; exit 101; fi
    [ "$2 $3 $4" = "tch torch-sys --precise" ] || exit 1
    printf '[[package]]\nname = "torch-sys"\nversion = "%s"\n' "$5" > Cargo.lock ;;
metadata)
    echo '{"packages":[
        {"name":"lora","manifest_path":"/w/crates/lora/Cargo.toml","targets":[],"dependencies":[{"name":"runtime"}]},
        {"name":"report","manifest_path":"/w/crates/report/Cargo.toml","targets":[],"dependencies":[]},
        {"name":"runtime","manifest_path":"/w/crates/runtime/Cargo.toml","targets":[],"dependencies":[{"name":"tch"}]}]}' ;;
esac
"#;

/// Passes for python3, in and out of an environment. `calls` counts its installations; `die` makes one of them kill the
/// program that runs it, half-way.
const PYTHON: &str = r#"#!/bin/sh
case "$*" in
*"import sys"*) echo 3 11 ;;
*ensurepip*) ;;
*"-m venv"*)
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
    cp "$0" "$3/bin/python" ;;
*"-m pip"*)
    echo install >> "$FAKE/calls"
    site=$(dirname "$0")/../lib/python3.11/site-packages
    mkdir -p "$site/torch/lib" "$site/torch/include/torch/csrc/autograd"
    if [ -e "$FAKE/die" ]; then rm "$FAKE/die"; kill -KILL $PPID; exit 1; fi
    sleep 0.3
    touch "$site/torch/lib/libtorch_cpu.so" "$site/torch/include/torch/csrc/autograd/function.h"
    version=$(expr "$*" : '.*torch==\([0-9.]*\)')
    echo "__version__ = '$version+cu130'" > "$site/torch/version.py"
    for wheel in torch-$version nvidia_cuda_cupti-13.0.1 nvidia_cuda_runtime-13.0.1; do
        mkdir -p "$site/$wheel.dist-info"
        echo "torch/version.py,sha256=x,29" > "$site/$wheel.dist-info/RECORD"
    done ;;
esac
"#;

/// A program cannot start while a child that another test is about to start still has it open for writing, so one test
/// at a time writes programs and starts them.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

struct Machine(tempfile::TempDir, #[expect(dead_code)] MutexGuard<'static, ()>);

impl Machine {
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let machine = Self(tempfile::tempdir().unwrap(), turn);
        let path = machine.path("bin");
        std::fs::create_dir(&path).unwrap();
        for (name, text) in [("python3", PYTHON), ("cargo", CARGO), ("c++", "#!/bin/sh\n")] {
            let program = path.join(name);
            std::fs::write(&program, text).unwrap();
            std::fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
        }
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A checkout as far as `setup` cares.
    fn checkout(&self, name: &str) -> PathBuf {
        let root = self.path(name);
        for folder in ["crates", "xtask"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        std::fs::write(root.join("xtask/Cargo.toml"), "").unwrap();
        std::fs::write(root.join("Cargo.lock"), "[[package]]\nname = \"torch-sys\"\nversion = \"0.24.0\"\n")
            .unwrap();
        root
    }

    fn setup(&self, checkout: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        for variable in ["CARGO_MANIFEST_DIR", "LIBTORCH", "VIRTUAL_ENV", "CXX"] {
            command.env_remove(variable);
        }
        let system = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{system}", self.path("bin").display()));
        command.env("CARGO", self.path("bin/cargo"));
        command.env("FRUGAL_CACHE", self.path("cache")).env("FAKE", self.0.path());
        command.current_dir(checkout).args(["setup", "--cpu"]);
        command
    }

    fn installations(&self) -> usize {
        std::fs::read_to_string(self.path("calls")).unwrap_or_default().lines().count()
    }
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_second_run_and_the_second_checkout_install_nothing() {
    let machine = Machine::new();
    let (a, b) = (machine.checkout("a"), machine.checkout("b"));
    for (checkout, says) in [(&a, "private environment"), (&a, "linked already"), (&b, "private environment")]
    {
        let output = machine.setup(checkout).output().unwrap();
        assert!(output.status.success(), "{}", words(&output));
        assert!(words(&output).contains(&format!("linked as .libtorch ({says}, ")), "{}", words(&output));
        assert!(checkout.join(".libtorch/version.py").exists());
    }
    assert_eq!(machine.installations(), 1);
}

#[test]
fn an_installation_that_was_killed_is_made_anew() {
    let machine = Machine::new();
    let checkout = machine.checkout("a");
    std::fs::write(machine.path("die"), "").unwrap();
    assert!(!machine.setup(&checkout).output().unwrap().status.success());
    assert!(!checkout.join(".libtorch").exists());
    let output = machine.setup(&checkout).output().unwrap();
    assert!(output.status.success(), "{}", words(&output));
    assert!(words(&output).contains("incomplete or damaged; creating it again"), "{}", words(&output));
    assert_eq!(machine.installations(), 2);
}

#[test]
fn two_checkouts_at_once_install_once() {
    let machine = Machine::new();
    let children: Vec<_> = ["a", "b", "c"]
        .map(|name| machine.setup(&machine.checkout(name)).stderr(Stdio::null()).spawn().unwrap())
        .into_iter()
        .map(|mut child| child.wait().unwrap())
        .collect();
    assert!(children.iter().all(std::process::ExitStatus::success));
    assert_eq!(machine.installations(), 1);
    assert!(machine.path("c/.libtorch/version.py").exists());
}

/// The version that the link leads to, and the one that is locked.
fn linked_and_locked(checkout: &Path) -> (String, String) {
    let read = |file: &str| std::fs::read_to_string(checkout.join(file)).unwrap();
    let version = |text: String, quote: char| text.split(quote).nth_back(1).unwrap().to_owned();
    (version(read(".libtorch/version.py"), '\''), version(read("Cargo.lock"), '"'))
}

#[test]
fn a_switch_moves_the_lock_and_the_link_together() {
    let machine = Machine::new();
    let checkout = machine.checkout("a");
    let check = |version: &str, expected: (&str, &str), says: &str| {
        let output = machine.setup(&checkout).args(["--torch", version]).output().unwrap();
        assert!(output.status.success(), "{}", words(&output));
        assert!(words(&output).contains(says), "{}", words(&output));
        let (linked, locked) = linked_and_locked(&checkout);
        assert_eq!((&*linked, &*locked), expected);
    };
    let old = ("2.11.0+cu130", "0.24.0");
    check("2.11", old, "setup: Cargo.lock already has tch 0.24.0 for torch 2.11.0\n");
    check(
        "2.13",
        ("2.13.0+cu130", "0.26.0"),
        "setup: Cargo.lock has tch 0.26.0 for torch 2.13.0 from here on; the next build compiles tch, torch-sys and what \
         links libtorch for it, each profile once: runtime, lora. What target/ holds for another version stays there for \
         a switch back\n",
    );
    check("2.11.0", old, "tch 0.24.0 for torch 2.11.0 from here on");
    assert_eq!(machine.installations(), 2, "each version has its own environment");
    let output = machine.setup(&checkout).output().unwrap();
    assert!(words(&output).contains("linked as .libtorch (linked already, "), "{}", words(&output));
}

#[test]
fn a_switch_that_fails_changes_neither() {
    let machine = Machine::new();
    let checkout = machine.checkout("a");
    assert!(machine.setup(&checkout).output().unwrap().status.success());
    let before = linked_and_locked(&checkout);
    let check = |version: &str, says: &str| {
        let output = machine.setup(&checkout).args(["--torch", version]).output().unwrap();
        assert!(!output.status.success());
        assert!(words(&output).contains(says), "{}", words(&output));
        assert_eq!(linked_and_locked(&checkout), before);
    };
    check(
        "2.12",
        "no tch that is known here goes with torch 2.12; the pairs are torch 2.11.0 with tch 0.24.0, torch 2.13.0 with tch \
         0.26.0",
    );
    std::fs::write(machine.path("no-network"), "").unwrap();
    check("2.13", "cargo could not lock tch 0.26.0; its error is above");
}

#[test]
fn a_lock_that_moved_moves_the_link() {
    let machine = Machine::new();
    let checkout = machine.checkout("a");
    assert!(machine.setup(&checkout).output().unwrap().status.success());
    std::fs::write(checkout.join("Cargo.lock"), "[[package]]\nname = \"torch-sys\"\nversion = \"0.26.0\"\n")
        .unwrap();
    let output = machine.setup(&checkout).output().unwrap();
    assert!(
        words(&output).contains("(it leads to version 2.11.0+cu130, and 2.13.0 is needed)"),
        "{}",
        words(&output)
    );
    assert_eq!(linked_and_locked(&checkout).0, "2.13.0+cu130");
}
