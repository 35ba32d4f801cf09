//! A bundle of `xtask` whose experiments are shell scripts, so that it can be killed many times.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The experiments, which write two records with a pause between them.
const NAMES: [&str; 3] = ["first", "second", "third"];

const SCRIPT: &str = r#"#!/bin/sh
set -e
while [ $# -gt 0 ]; do if [ "$1" = --records ]; then records=$2; fi; shift; done
for value in 1 2; do
    sleep 0.05
    echo "{\"experiment\":\"NAME\",\"case\":{\"batch\":$value},\"metric\":{\"name\":\"seconds\",\"unit\":\"s\",\"value\":$value,\"n\":1},\"environment\":{\"device\":\"cpu\",\"cpu\":\"x\",\"threads\":2,\"memory_bytes\":1,\"revision\":\"abc1234\",\"unix_time\":1}}" >> "$records"
done
"#;

/// Writes the bundle with a copy of `xtask`.
///
/// # Errors
/// A full disk.
pub(super) fn write(folder: &Path, xtask: &Path) -> anyhow::Result<()> {
    let specs = folder.join("crates/experiments/experiments");
    for path in [&folder.join("bin"), &specs, &folder.join("xtask/peers")] {
        std::fs::create_dir_all(path)?;
    }
    std::fs::copy(xtask, folder.join("bin/xtask"))?;
    std::fs::write(folder.join("xtask/peers/requirements.txt"), "torch==2.15.0\n")?;
    let mut registered = String::new();
    for name in NAMES {
        let path = folder.join("bin").join(name);
        std::fs::write(&path, SCRIPT.replace("NAME", name))?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
        registered += &format!(
            "[[experiment]]\nname = \"{name}\"\ntitle = \"{name}\"\nabout = \"\"\npackage = \"{name}\"\n"
        );
    }
    std::fs::write(specs.join("scripts.toml"), registered)?;
    let programs: Vec<String> = NAMES.iter().map(|name| format!("\"{name}\":\"bin/{name}\"")).collect();
    let manifest = format!(
        "{{\"revision\":\"abc1234\",\"torch\":\"2.11.0\",\"programs\":{{{}}},\"tests\":[]}}",
        programs.join(",")
    );
    Ok(std::fs::write(folder.join("bin/bundle.json"), manifest)?)
}
