//! Cargo as a child process: builds executables with libtorch, and changes the locked `tch`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::torch::Pair;
use crate::workspace::Workspace;

/// Returns a cargo command in the checkout, whose programs find libtorch.
pub(crate) fn command(workspace: &Workspace) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&workspace.root);
    // `cargo run` describes this package to it. Passed on, build scripts that ask for these variables, as `ring`'s, would run
    // again whenever cargo is called from here after a shell or the reverse, and with them all that depends on their crates.
    let is_cargos =
        |name: &str| ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.starts_with(prefix));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_cargos) {
            command.env_remove(name);
        }
    }
    with_libtorch(&mut command, workspace);
    command
}

/// Lets the programs that `command` runs find libtorch, wherever they were built.
pub(crate) fn with_libtorch(command: &mut Command, workspace: &Workspace) {
    if workspace.bundle.is_some() {
        return;
    }
    let link = workspace.libtorch();
    command.env("LD_LIBRARY_PATH", search_path(&link.join("lib"), std::env::var_os("LD_LIBRARY_PATH")));
    // The outer cargo sets it from the configuration. Passed on, it would look to the inner cargo like a changed
    // environment, and the bindings would be compiled again.
    if std::env::var_os("LIBTORCH").is_some_and(|folder| Path::new(&folder) == link) {
        command.env_remove("LIBTORCH");
    }
}

/// Returns `first` followed by the previous search path.
fn search_path(first: &Path, before: Option<OsString>) -> OsString {
    let mut path = first.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        path.push(":");
        path.push(before);
    }
    path
}

/// An executable that cargo made.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Executable {
    /// Name of the target.
    pub(crate) name: String,
    /// The package's folder under `crates/`.
    pub(crate) package: String,
    /// Whether it is a test rather than a program.
    pub(crate) test: bool,
    pub(crate) path: PathBuf,
}

/// How the programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Optimization {
    /// The profile `dev`, which the tests share: quick to build. For a run that checks and does not measure.
    Dev,
    /// The profile `release`, for measurements.
    Release,
}

/// Builds the programs of `packages`, with cargo's own progress on the terminal.
pub(crate) fn build_programs(
    workspace: &Workspace,
    packages: &[String],
    optimization: Optimization,
) -> Result<BTreeMap<String, PathBuf>> {
    if packages.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut args: Vec<&str> = vec!["build", "--bins"];
    if optimization == Optimization::Release {
        args.push("--release");
    }
    args.extend(packages.iter().flat_map(|package| ["--package", package]));
    let made = executables(workspace, &args)?;
    let programs: BTreeMap<_, _> =
        made.into_iter().filter(|e| !e.test).map(|e| (e.package, e.path)).collect();
    match packages.iter().find(|package| !programs.contains_key(*package)) {
        Some(package) => bail!("the package {package} has no binary"),
        None => Ok(programs),
    }
}

/// Runs a building cargo command and collects the executables that it names.
pub(crate) fn executables(workspace: &Workspace, args: &[&str]) -> Result<Vec<Executable>> {
    let mut made = Vec::new();
    build(workspace, args, |executable| made.push(executable))?;
    Ok(made)
}

/// Runs a building cargo command and passes each executable to `made` as soon as it is linked.
pub(crate) fn build(workspace: &Workspace, args: &[&str], mut made: impl FnMut(Executable)) -> Result<()> {
    eprintln!("build: cargo {}", args.join(" "));
    let mut command = command(workspace);
    command.args(args).arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot run cargo")?;
    let output = child.stdout.take().expect("standard output is piped");
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("cannot read cargo's messages")?;
        if let Some(executable) = executable_of(&String::from_utf8_lossy(&line)) {
            made(executable);
        }
    }
    if !child.wait().context("cannot wait for cargo")?.success() {
        bail!("the build failed; cargo's errors are above");
    }
    Ok(())
}

#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    #[serde(default)]
    kind: Vec<String>,
}

impl Target {
    fn is_program(&self) -> bool {
        self.kind.iter().any(|kind| kind == "bin")
    }
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// The executable in one line of cargo's messages; most lines are about something else.
fn executable_of(line: &str) -> Option<Executable> {
    let message: Message = serde_json::from_str(line).ok()?;
    let package = folder_of(&message.manifest_path)?;
    let is_program = message.target.is_program();
    let mut name = message.target.name;
    // A package's library and its binary may have one name, and each has an executable of its own tests.
    if message.profile.test && is_program {
        name.push_str("-bin");
    }
    Some(Executable { name, package, test: message.profile.test, path: message.executable? })
}

/// Locks the `tch` of `pair` in `Cargo.lock` and changes nothing else.
pub(crate) fn lock_tch(workspace: &Workspace, pair: &Pair) -> Result<()> {
    let mut command = command(workspace);
    command.args(["update", "tch", "torch-sys", "--precise", pair.tch]);
    if !command.status().context("cannot run cargo update")?.success() {
        bail!(
            "cargo could not lock tch {}; its error is above. If there is no network and the crate was downloaded \
             before, set CARGO_NET_OFFLINE=true",
            pair.tch
        );
    }
    Ok(())
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// Whether it is compiled only for a feature.
    #[serde(default)]
    optional: bool,
}

/// The workspace's packages that link libtorch.
pub(crate) fn packages_with_torch(workspace: &Workspace) -> Result<Vec<String>> {
    Ok(linking_torch(&packages(workspace)?))
}

/// The folders under `crates/` of the packages that have a program.
pub(crate) fn packages_with_programs(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let packages = packages(workspace)?;
    let with_programs = packages.iter().filter(|package| package.targets.iter().any(Target::is_program));
    Ok(with_programs.filter_map(|package| folder_of(&package.manifest_path)).collect())
}

fn packages(workspace: &Workspace) -> Result<Vec<Package>> {
    let mut command: Command = command(workspace);
    let output = command.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).output();
    let output = output.context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cargo metadata gave no JSON")?;
    Ok(metadata.packages)
}

/// The name of the folder that holds a manifest.
fn folder_of(manifest: &Path) -> Option<String> {
    Some(manifest.parent()?.file_name()?.to_str()?.to_owned())
}

/// Returns the packages that depend on `tch` without a feature, directly or through another package of the workspace.
fn linking_torch(packages: &[Package]) -> Vec<String> {
    let mut linking: Vec<String> = vec!["tch".into(), "torch-sys".into()];
    loop {
        let links = |package: &&Package| {
            let mut always = package.dependencies.iter().filter(|dependency| !dependency.optional);
            !linking.contains(&package.name) && always.any(|dependency| linking.contains(&dependency.name))
        };
        match packages.iter().find(links) {
            Some(package) => linking.push(package.name.clone()),
            None => return linking.split_off(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_path_keeps_what_was_there() {
        let path = |before: Option<&str>| search_path(Path::new("/t/lib"), before.map(OsString::from));
        assert_eq!(path(None), "/t/lib");
        assert_eq!(path(Some("")), "/t/lib");
        assert_eq!(path(Some("/a:/b")), "/t/lib:/a:/b");
    }

    #[test]
    fn executables_are_read_from_messages() {
        let line = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/crates/lora#0.1.0","manifest_path":"/w/crates/lora/Cargo.toml","target":{"kind":["bin"],"name":"lora"},"profile":{"test":false},"executable":"/w/target/release/lora"}"#;
        let expected = Executable {
            name: "lora".into(),
            package: "lora".into(),
            test: false,
            path: "/w/target/release/lora".into(),
        };
        assert_eq!(executable_of(line), Some(expected));
        assert_eq!(executable_of(&line.replace("\"/w/target/release/lora\"", "null")), None);
        assert_eq!(executable_of(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(executable_of("running 3 tests"), None);
    }

    /// A first `cargo xtask run-all` builds both: a package with different features would be compiled twice, with all that
    /// depends on it.
    #[test]
    fn what_xtask_and_the_measuring_programs_share_is_compiled_once() {
        let features = |packages: &[&str]| {
            let mut command = Command::new(std::env::var_os("CARGO").expect("cargo runs the tests"));
            command.args([
                "tree",
                "--offline",
                "--edges",
                "normal,build",
                "--prefix",
                "none",
                "--format",
                "{p} [{f}]",
            ]);
            command.args(packages.iter().flat_map(|package| ["--package", package]));
            let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let mut features = BTreeMap::<String, BTreeSet<String>>::new();
            for line in String::from_utf8(output.stdout).unwrap().lines().filter(|line| !line.is_empty()) {
                let (package, chosen) = line.trim_end_matches(" (*)").split_once(" [").unwrap();
                features.entry(package.to_owned()).or_default().insert(chosen.to_owned());
            }
            features
        };
        let (of_xtask, programs) = (features(&["xtask"]), features(&["frugal-cli", "experiments"]));
        let shared: Vec<_> = of_xtask.iter().filter(|(package, _)| programs.contains_key(*package)).collect();
        assert!(shared.len() > 50, "{shared:?}");
        for (package, features) in shared {
            let of_programs = &programs[package];
            assert!(features.is_subset(of_programs), "{package}: {features:?} here, {of_programs:?} there");
        }
    }

    #[test]
    fn packages_with_torch_are_found_through_others() {
        let package = |name: &str, dependencies: &[&str]| Package {
            name: name.into(),
            manifest_path: PathBuf::new(),
            targets: Vec::new(),
            dependencies: dependencies
                .iter()
                .map(|&name| Dependency { name: name.into(), optional: false })
                .collect(),
        };
        let all = [
            package("lora", &["runtime", "report"]),
            package("report", &["serde"]),
            package("runtime", &["tch"]),
            package("xtask", &["report"]),
        ];
        assert_eq!(linking_torch(&all), ["runtime", "lora"]);
    }
}
