//! `cargo xtask sbom`: the packages that are linked, as a CycloneDX file; and for `lint`, whether their licences are accepted.
//!
//! Advisories are not checked: their database is on the network.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cargo;
use crate::workspace::Workspace;

/// Licences that let others use this project under its own terms.
const ACCEPTED: [&str; 10] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Accepted for one package only: its licence covers changes to its own files.
const EXCEPTIONS: [(&str, &str); 1] = [("option-ext", "MPL-2.0")];

/// Where to write.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write to FILE instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    description: Option<String>,
    repository: Option<String>,
}

impl Package {
    /// The licence as an SPDX expression: cargo once separated alternatives by slashes.
    fn expression(&self) -> Option<String> {
        self.license.as_ref().map(|license| license.replace('/', " OR "))
    }

    /// Why its licence is not accepted.
    fn refusal(&self) -> Option<String> {
        let Some(expression) = self.expression() else {
            return Some(format!("{} {} names no licence", self.name, self.version));
        };
        let accepted = |name: &str| ACCEPTED.contains(&name) || EXCEPTIONS.contains(&(&*self.name, name));
        let parsed = match spdx::Expression::parse_mode(&expression, spdx::ParseMode::LAX) {
            Ok(parsed) => parsed,
            Err(error) => {
                return Some(format!("{} {}: `{expression}`: {}", self.name, self.version, error.reason));
            }
        };
        let fits = parsed.evaluate(|asked| asked.license.id().is_some_and(|id| accepted(id.name)));
        (!fits).then(|| format!("{} {} has the licence {expression}", self.name, self.version))
    }
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

/// The packages of `Cargo.lock` that this platform links, without the workspace's own.
fn packages(workspace: &Workspace) -> Result<Vec<Package>> {
    let output = cargo::command(workspace).args(["metadata", "--format-version", "1", "--locked"]).output();
    let output = output.context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("the output of cargo metadata")?;
    let is_member = |package: &Package| metadata.workspace_members.contains(&package.id);
    Ok(metadata.packages.into_iter().filter(|package| !is_member(package)).collect())
}

/// Fails if the licence of a package is not accepted.
///
/// # Errors
/// The packages, with their licences.
pub(crate) fn check_licences(workspace: &Workspace) -> Result<()> {
    let packages = packages(workspace)?;
    let refused: Vec<String> = packages.iter().filter_map(Package::refusal).collect();
    if !refused.is_empty() {
        bail!(
            "{}; take another package, or add the licence to ACCEPTED in xtask/src/dependencies.rs with care",
            refused.join("; ")
        );
    }
    println!("lint: the licences of {} packages are accepted; advisories are not checked", packages.len());
    Ok(())
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    workspace.need_sources("sbom")?;
    let text = document(workspace)?;
    match &args.out {
        Some(path) => {
            files::atomic_write::unsynced(path, text.as_bytes()).with_context(|| path.display().to_string())
        }
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

/// The packages as a CycloneDX document.
///
/// # Errors
/// A `Cargo.lock` that does not fit the manifests.
pub(crate) fn document(workspace: &Workspace) -> Result<String> {
    let lock = std::fs::read_to_string(workspace.root.join("Cargo.lock")).context("Cargo.lock")?;
    let lock: Lock = toml::from_str(&lock).context("Cargo.lock")?;
    let checksums: BTreeMap<(String, String), String> = lock
        .package
        .into_iter()
        .filter_map(|locked| Some(((locked.name, locked.version), locked.checksum?)))
        .collect();
    let components: Vec<Value> =
        packages(workspace)?.iter().map(|package| component(package, &checksums)).collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": { "type": "application", "name": "frugal", "version": env!("CARGO_PKG_VERSION") } },
        "components": components,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

fn component(package: &Package, checksums: &BTreeMap<(String, String), String>) -> Value {
    let mut component = json!({
        "type": "library",
        "name": package.name,
        "version": package.version,
        "purl": format!("pkg:cargo/{}@{}", package.name, package.version),
    });
    if let Some(expression) = package.expression() {
        component["licenses"] = json!([{ "expression": expression }]);
    }
    if let Some(description) = &package.description {
        component["description"] = json!(description.trim());
    }
    if let Some(repository) = &package.repository {
        component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    if let Some(checksum) = checksums.get(&(package.name.clone(), package.version.clone())) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_is_accepted_if_one_alternative_is() {
        let refusal = |license: Option<&str>| {
            let license = license.map(str::to_owned);
            let (id, name, version) = (String::new(), "some".to_owned(), "1.0.0".to_owned());
            Package { id, name, version, license, description: None, repository: None }.refusal()
        };
        for accepted in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
        ] {
            assert_eq!(refusal(Some(accepted)), None, "{accepted}");
        }
        assert_eq!(refusal(Some("MPL-2.0")).unwrap(), "some 1.0.0 has the licence MPL-2.0");
        assert_eq!(
            refusal(Some("MIT AND GPL-3.0-only")).unwrap(),
            "some 1.0.0 has the licence MIT AND GPL-3.0-only"
        );
        assert_eq!(refusal(None).unwrap(), "some 1.0.0 names no licence");
        assert!(refusal(Some("Made up")).unwrap().starts_with("some 1.0.0: `Made up`: "));
    }
}
