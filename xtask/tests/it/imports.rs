//! Each technique in an empty project of its own, as its README says: it compiles, and its example runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The crates that people import one by one, and the most packages of others that each may compile. 82 of them are those of `tch`, whose build
/// script can download libtorch; `dataloading` has the readers of files and the tokenizers.
const CRATES: [(&str, usize); 7] = [
    ("swiglu-ckpt", 120),
    ("fused-ce", 120),
    ("lora", 120),
    ("amp", 124),
    ("offload", 124),
    ("sharding", 124),
    ("dataloading", 170),
];

/// Around an example: what a library must leave as it found it.
const MAIN: &str = r#"
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let before = state();
    example()?;
    assert_eq!(state(), before, "a library changes signals, limits or threads only when it is asked");
    Ok(())
}

/// Signals that are caught or ignored, limits, and the variables of the environment.
fn state() -> (Vec<String>, String, Vec<(String, String)>) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let signals = status.lines().filter(|line| line.starts_with("SigCgt") || line.starts_with("SigIgn"));
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    (signals.map(str::to_owned).collect(), limits, std::env::vars().collect())
}
"#;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The text of the first block of this language in a README.
fn block<'a>(readme: &'a str, language: &str) -> &'a str {
    let (_, rest) = readme.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

/// A project that depends on `name` as its README says, but for the place: `source` is what stands for `path = "frugal/crates/NAME"`.
fn project(folder: &Path, name: &str, source: impl Fn(&str) -> String) {
    let readme = std::fs::read_to_string(root().join("crates").join(name).join("README.md")).unwrap();
    let dependencies: String = block(&readme, "toml")
        .lines()
        .map(|line| match line.split_once("path = \"frugal/crates/") {
            None => format!("{line}\n"),
            Some((before, rest)) => {
                let (krate, after) = rest.split_once('"').unwrap();
                format!("{before}{}{after}\n", source(krate))
            }
        })
        .collect();
    let manifest = format!(
        "[package]\nname = \"importing-{name}\"\nedition = \"2024\"\n\n{dependencies}\n[workspace]\n"
    );
    let example = block(&readme, "rust");
    let program =
        format!("fn example() -> Result<(), Box<dyn std::error::Error>> {{\n{example}Ok(())\n}}\n{MAIN}");
    std::fs::create_dir_all(folder.join("src")).unwrap();
    std::fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    std::fs::write(folder.join("src/main.rs"), program).unwrap();
    // The versions that this workspace is tested with.
    std::fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
}

/// Cargo in the project, with no variable but libtorch's, as the guide says.
fn cargo(folder: &Path, target: &Path) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(folder).env_clear().env("CARGO_TARGET_DIR", target);
    for kept in ["PATH", "HOME", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "CARGO_BUILD_JOBS"] {
        command.envs(std::env::var_os(kept).map(|value| (kept, value)));
    }
    command.env("LIBTORCH", root().join(".libtorch").canonicalize().unwrap());
    command
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "compiles libtorch's bindings and seven crates, for minutes"]
fn each_technique_is_imported_alone() {
    let work = tempfile::tempdir().unwrap();
    let target = work.path().join("target");
    for (name, most) in CRATES {
        let folder = work.path().join(name);
        project(&folder, name, |krate| format!("path = \"{}\"", root().join("crates").join(krate).display()));
        let tree =
            succeed(cargo(&folder, &target).args(["tree", "--edges", "normal,build", "--prefix", "none"]));
        let of_others = tree.lines().filter(|line| !line.contains(" (/"));
        let mut packages: Vec<&str> = of_others.map(|line| line.trim_end_matches(" (*)")).collect();
        packages.sort_unstable();
        packages.dedup();
        assert!(packages.len() <= most, "{name} compiles {} packages", packages.len());
        let start = Instant::now();
        succeed(cargo(&folder, &target).arg("run"));
        eprintln!(
            "{name}: {} packages, compiled after the ones before it and run in {:.0} s",
            packages.len(),
            start.elapsed().as_secs_f64()
        );
    }
}

#[test]
#[ignore = "compiles libtorch's bindings, for minutes"]
fn a_technique_is_imported_from_git() {
    let work = tempfile::tempdir().unwrap();
    let folder = work.path().join("from-git");
    project(&folder, "swiglu-ckpt", |_| format!("git = \"file://{}\"", root().display()));
    succeed(cargo(&folder, &work.path().join("target")).arg("run"));
}
