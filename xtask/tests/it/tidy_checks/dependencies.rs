//! Checks on dependencies between crates, and on each member's manifest.

use std::collections::{BTreeMap, BTreeSet};

use super::Tree;

/// The members with a binary. They may build on everything, and no library on them.
const PROGRAMS: [&str; 3] = ["experiments", "frugal-cli", "xtask"];
/// The library that puts the techniques together: programs alone build on it.
const FACADE: &str = "frugal";
/// Packages that only a program needs.
const FOR_PROGRAMS: [&str; 4] = ["anyhow", "clap", "indicatif", "report"];
/// Crates that every technique may build on; all other libraries are techniques.
const LAYERS: [&str; 11] = [
    "report",
    "files",
    "decoder",
    "gguf",
    "accounting",
    "trace",
    "runtime",
    "kernels",
    "models",
    "dataloading",
    "training",
];
/// Crates for tests alone: never a dependency of what is built without tests.
const FOR_TESTS: [&str; 2] = ["ptx", "testing"];
/// Members that build in seconds on a machine without libtorch, but for what a feature of another one adds.
const WITHOUT_TORCH: [&str; 9] =
    ["accounting", "decoder", "files", "gguf", "ptx", "report", "testing", "trace", "xtask"];
/// Members with unsafe code, which state their lints by themselves.
const WITH_UNSAFE: [&str; 3] = ["crates/files", "crates/kernels", "crates/runtime"];
const TORCH: [&str; 2] = ["tch", "torch-sys"];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let members = tree.members();
    let by_name: BTreeMap<&str, (&str, BTreeSet<String>)> = members
        .iter()
        .map(|(folder, manifest)| {
            let name = folder.rsplit('/').next().unwrap_or(folder);
            (name, (*folder, dependencies_of(manifest)))
        })
        .collect();
    let always: BTreeMap<&str, BTreeSet<String>> = members
        .iter()
        .map(|(folder, manifest)| {
            let mut dependencies = dependencies_of(manifest);
            dependencies.retain(|dependency| !is_optional(manifest, dependency));
            (folder.rsplit('/').next().unwrap_or(folder), dependencies)
        })
        .collect();
    let mut problems = Vec::new();
    for (name, (folder, dependencies)) in &by_name {
        for dependency in dependencies {
            let known = by_name.contains_key(&**dependency);
            match (known && is_technique(dependency), is_technique(name)) {
                (true, true) => problems.push(format!(
                    "{folder}/Cargo.toml: the technique `{name}` depends on the technique `{dependency}`; what both need \
                     belongs into runtime, kernels, models or training"
                )),
                (true, false) if PROGRAMS.contains(name) || *name == FACADE => {}
                (true, false) => problems.push(format!(
                    "{folder}/Cargo.toml: `{name}` depends on the technique `{dependency}`; techniques build on it, not \
                     the other way round"
                )),
                (false, _) => {}
            }
            if (PROGRAMS.contains(&&**dependency) || dependency == FACADE) && !PROGRAMS.contains(name) {
                problems.push(format!(
                    "{folder}/Cargo.toml: the library `{name}` depends on `{dependency}`, which puts libraries together; it \
                     builds on them, not the other way round"
                ));
            }
        }
        if WITHOUT_TORCH.contains(name)
            && let Some(chain) = chain_to_torch(name, &always, &mut BTreeSet::new())
        {
            problems.push(format!(
                "{name} links libtorch: {}; it must build on a machine without",
                chain.join(" -> ")
            ));
        }
    }
    for (folder, manifest) in &members {
        let built = dependencies_of_kinds(manifest, &BUILT);
        for dependency in FOR_TESTS.iter().filter(|name| built.contains(**name)) {
            // `cargo xtask kernels` is a check, too.
            if (*folder, *dependency) == ("xtask", "ptx") {
                continue;
            }
            problems.push(format!(
                "{folder}/Cargo.toml: `{dependency}` is for tests; name it under [dev-dependencies]"
            ));
        }
        let name = folder.rsplit('/').next().unwrap_or(folder);
        // `report` makes the pages, and is what programs alone depend on.
        if !PROGRAMS.contains(&name) && name != "report" {
            for dependency in FOR_PROGRAMS.iter().filter(|name| built.contains(**name)) {
                if is_optional(manifest, dependency) {
                    continue;
                }
                problems.push(format!(
                    "{folder}/Cargo.toml: the library `{name}` depends on `{dependency}`, which is for programs"
                ));
            }
        }
        let inherited =
            manifest.get("lints").and_then(|lints| lints.get("workspace")).and_then(toml::Value::as_bool);
        if inherited != Some(true) && !WITH_UNSAFE.contains(folder) {
            problems.push(format!("{folder}/Cargo.toml: add `[lints]` with `workspace = true`"));
        }
        problems.extend(binaries(tree, folder, manifest));
    }
    problems
}

fn is_technique(name: &str) -> bool {
    !LAYERS.contains(&name) && !FOR_TESTS.contains(&name) && !PROGRAMS.contains(&name) && name != FACADE
}

/// Dependencies that come with a crate's library or program, or its build.
const BUILT: [&str; 2] = ["dependencies", "build-dependencies"];

/// Whether a dependency is compiled only for a feature.
fn is_optional(manifest: &toml::Table, dependency: &str) -> bool {
    let table = manifest.get("dependencies").and_then(|all| all.get(dependency));
    table.and_then(|table| table.get("optional")).and_then(toml::Value::as_bool) == Some(true)
}

/// Packages that a manifest names as a dependency of any kind, for any target.
fn dependencies_of(manifest: &toml::Table) -> BTreeSet<String> {
    dependencies_of_kinds(manifest, &["dependencies", "dev-dependencies", "build-dependencies"])
}

fn dependencies_of_kinds(manifest: &toml::Table, kinds: &[&str]) -> BTreeSet<String> {
    let targets =
        manifest.get("target").and_then(toml::Value::as_table).into_iter().flat_map(toml::Table::values);
    let tables = std::iter::once(manifest).chain(targets.filter_map(toml::Value::as_table));
    let mut names = BTreeSet::new();
    for table in tables {
        for kind in kinds {
            for (key, value) in table.get(*kind).and_then(toml::Value::as_table).into_iter().flatten() {
                let renamed = value.get("package").and_then(toml::Value::as_str);
                names.insert(renamed.unwrap_or(key).to_owned());
            }
        }
    }
    names
}

/// The way from `name` to libtorch through the workspace, where there is one.
fn chain_to_torch<'a>(
    name: &'a str,
    members: &'a BTreeMap<&str, BTreeSet<String>>,
    seen: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a str>> {
    if TORCH.contains(&name) {
        return Some(vec![name]);
    }
    if !seen.insert(name) {
        return None;
    }
    let rest = members.get(name)?.iter().find_map(|dependency| chain_to_torch(dependency, members, seen))?;
    Some([vec![name], rest].concat())
}

/// Programs have one binary, of the crate's own name without `-cli`, and libraries none.
fn binaries(tree: &Tree, folder: &str, manifest: &toml::Table) -> Vec<String> {
    let package = folder.rsplit('/').next().unwrap_or(folder);
    let name = package.strip_suffix("-cli").unwrap_or(package);
    let mut names: BTreeSet<String> = BTreeSet::new();
    for (path, _) in tree.with_extension(&["rs"]) {
        let Some(source) = path.strip_prefix(folder).and_then(|rest| rest.strip_prefix("/src/")) else {
            continue;
        };
        if source == "main.rs" {
            names.insert(name.to_owned());
        } else if let Some(name) = source.strip_prefix("bin/") {
            let name = name.strip_suffix("/main.rs").or_else(|| name.strip_suffix(".rs")).unwrap_or(name);
            if !name.contains('/') {
                names.insert(name.to_owned());
            }
        }
    }
    let declared = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    names.extend(declared.filter_map(|bin| bin.get("name")?.as_str().map(str::to_owned)));
    let listed: Vec<&str> = names.iter().map(String::as_str).collect();
    let library = !PROGRAMS.contains(&package);
    match listed.as_slice() {
        [] => Vec::new(),
        all if library => {
            vec![format!(
                "{folder}: the library has the binary {}; what people run is in {}",
                all.join(", "),
                PROGRAMS.join(", ")
            )]
        }
        [one] if *one == name => Vec::new(),
        [one] => vec![format!("{folder}: the binary `{one}` has another name than its crate")],
        all => vec![format!(
            "{folder}: {} binaries ({}); a crate has at most one, of its own name",
            all.len(),
            all.join(", ")
        )],
    }
}
