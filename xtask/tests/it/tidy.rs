//! The invariants of the workspace, checked on its own files. See `ARCHITECTURE.md` for why each of them is there.
//!
//! Every check is a function of a [`Tree`], so that the tests below can show on bad samples that it catches what it is for.

use std::path::Path;

use crate::tidy_checks::{Tree, dependencies, layout, sources};
use expect_test::{Expect, expect};

fn workspace() -> Tree {
    Tree::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
}

fn report(violations: Vec<String>) {
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn nobody_depends_on_whom_they_must_not() {
    report(dependencies::check(&workspace()));
}

#[test]
fn every_file_is_in_its_place() {
    report(layout::check(&workspace()));
}

#[test]
fn unsafe_code_has_its_place_and_its_reason() {
    report(sources::check(&workspace()));
}

#[test]
fn the_files_that_the_report_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let specs = ::report::Specs::load(&root).expect("the registered experiments load");
    let rows = specs.parts.iter().flat_map(|part| part.rows.iter().map(move |row| (part, row)));
    let missing = rows.flat_map(|(part, row)| {
        let gone = row.code.iter().filter(|path| !root.join(path).exists());
        gone.map(|path| format!("the part `{}` names {path}, which does not exist", part.name))
    });
    report(missing.collect());
}

/// What travels to a GPU that is lent by the minute is 64 MiB at most: the tree, and a bundle of 27 MiB beside it.
#[test]
fn the_tree_leaves_room_for_a_bundle() {
    const LIMIT: u64 = 37 << 20;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let size = |path: &str| std::fs::metadata(root.join(path)).map_or(0, |file| file.len());
    let mut sizes: Vec<(u64, String)> =
        workspace().files.into_iter().map(|(path, _)| (size(&path), path)).collect();
    let total: u64 = sizes.iter().map(|(size, _)| size).sum();
    sizes.sort_unstable();
    let largest: Vec<_> = sizes.iter().rev().take(5).collect();
    assert!(total > 1 << 20, "the tree was not found");
    assert!(
        total <= LIMIT,
        "the tree is {total} bytes, {} too many; the largest: {largest:?}",
        total - LIMIT
    );
}

/// Runs every check on a sample.
fn check(files: &[(&str, &str)], expected: Expect) {
    let tree = Tree::new(files);
    let problems = [dependencies::check(&tree), layout::check(&tree), sources::check(&tree)].concat();
    expected.assert_eq(&problems.join("\n"));
}

const MEMBER: &str = "[lints]\nworkspace = true\n[dependencies]\n";

#[test]
fn a_technique_that_depends_on_a_technique_is_caught() {
    check(
        &[
            ("crates/amp/Cargo.toml", MEMBER),
            ("crates/lora/Cargo.toml", &format!("{MEMBER}amp.workspace = true\n")),
        ],
        expect![
            "crates/lora/Cargo.toml: the technique `lora` depends on the technique `amp`; what both need belongs into runtime, kernels, models or training"
        ],
    );
    let as_development_dependency = format!("{MEMBER}[dev-dependencies]\namp = {{ path = \"../amp\" }}\n");
    check(
        &[("crates/amp/Cargo.toml", MEMBER), ("crates/lora/Cargo.toml", &as_development_dependency)],
        expect![
            "crates/lora/Cargo.toml: the technique `lora` depends on the technique `amp`; what both need belongs into runtime, kernels, models or training"
        ],
    );
}

#[test]
fn programs_compose_techniques_and_no_library_builds_on_them() {
    let program = format!("{MEMBER}amp.workspace = true\nclap.workspace = true\n");
    check(&[("crates/amp/Cargo.toml", MEMBER), ("crates/experiments/Cargo.toml", &program)], expect![""]);
    check(
        &[
            ("crates/amp/Cargo.toml", &format!("{MEMBER}experiments.workspace = true\n")),
            ("crates/experiments/Cargo.toml", MEMBER),
        ],
        expect![
            "crates/amp/Cargo.toml: the library `amp` depends on `experiments`, which puts libraries together; it builds on them, not the other way round"
        ],
    );
}

#[test]
fn what_is_for_programs_is_caught_in_a_library() {
    let in_tests = format!("{MEMBER}[dev-dependencies]\nreport.workspace = true\n");
    check(&[("crates/amp/Cargo.toml", &in_tests)], expect![""]);
    check(
        &[("crates/amp/Cargo.toml", &format!("{MEMBER}clap.workspace = true\n"))],
        expect!["crates/amp/Cargo.toml: the library `amp` depends on `clap`, which is for programs"],
    );
}

#[test]
fn a_layer_that_depends_on_a_technique_is_caught() {
    check(
        &[
            ("crates/lora/Cargo.toml", MEMBER),
            ("crates/models/Cargo.toml", &format!("{MEMBER}lora.workspace = true\n")),
        ],
        expect![
            "crates/models/Cargo.toml: `models` depends on the technique `lora`; techniques build on it, not the other way round"
        ],
    );
}

#[test]
fn libtorch_below_a_crate_that_must_build_without_is_caught() {
    check(
        &[
            (
                "crates/accounting/Cargo.toml",
                &format!("{MEMBER}[dev-dependencies]\nreport.workspace = true\n"),
            ),
            ("crates/report/Cargo.toml", &format!("{MEMBER}runtime.workspace = true\n")),
            ("crates/runtime/Cargo.toml", "[dependencies]\ntch.workspace = true\n"),
        ],
        expect![[r#"
            accounting links libtorch: accounting -> report -> runtime -> tch; it must build on a machine without
            report links libtorch: report -> runtime -> tch; it must build on a machine without"#]],
    );
    let renamed = format!("{MEMBER}torch = {{ package = \"tch\", version = \"0.24\" }}\n");
    check(
        &[("xtask/Cargo.toml", &renamed)],
        expect!["xtask links libtorch: xtask -> tch; it must build on a machine without"],
    );
}

#[test]
fn what_is_for_tests_is_caught_elsewhere() {
    let in_tests = format!("{MEMBER}[dev-dependencies]\ntesting.workspace = true\n");
    check(&[("crates/testing/Cargo.toml", MEMBER), ("crates/report/Cargo.toml", &in_tests)], expect![""]);
    check(
        &[
            ("crates/testing/Cargo.toml", MEMBER),
            ("crates/report/Cargo.toml", &format!("{MEMBER}testing.workspace = true\n")),
        ],
        expect!["crates/report/Cargo.toml: `testing` is for tests; name it under [dev-dependencies]"],
    );
}

#[test]
fn a_member_without_the_lints_of_the_workspace_is_caught() {
    check(
        &[("crates/amp/Cargo.toml", "[dependencies]\n"), ("crates/runtime/Cargo.toml", "[dependencies]\n")],
        expect!["crates/amp/Cargo.toml: add `[lints]` with `workspace = true`"],
    );
}

#[test]
fn binaries_beside_the_programs_are_caught() {
    check(
        &[
            ("crates/amp/Cargo.toml", MEMBER),
            ("crates/amp/src/main.rs", ""),
            ("crates/experiments/Cargo.toml", MEMBER),
            ("crates/experiments/src/main.rs", ""),
            ("crates/experiments/src/bin/other.rs", ""),
            ("crates/frugal-cli/Cargo.toml", &format!("[[bin]]\nname = \"tuner\"\n{MEMBER}")),
            ("crates/lora/Cargo.toml", &format!("[[bin]]\nname = \"adapter\"\n{MEMBER}")),
        ],
        expect![[r#"
            crates/amp: the library has the binary amp; what people run is in experiments, frugal-cli, xtask
            crates/experiments: 2 binaries (experiments, other); a crate has at most one, of its own name
            crates/frugal-cli: the binary `tuner` has another name than its crate
            crates/lora: the library has the binary adapter; what people run is in experiments, frugal-cli, xtask"#]],
    );
}

#[test]
fn strangers_at_the_top_are_caught() {
    check(
        &[("README.md", ""), (".gitignore", ""), ("notes.txt", ""), ("scripts/run.py", "")],
        expect![[r#"
            notes.txt: the top level holds Cargo.toml Cargo.lock README.md ARCHITECTURE.md SECURITY.md LICENSE-* crates data reports xtask and dotfiles only
            scripts: the top level holds Cargo.toml Cargo.lock README.md ARCHITECTURE.md SECURITY.md LICENSE-* crates data reports xtask and dotfiles only"#]],
    );
}

#[test]
fn names_without_a_subject_and_long_files_are_caught() {
    check(
        &[
            ("crates/amp/src/utils.rs", ""),
            ("crates/amp/src/helpers/mod.rs", ""),
            ("crates/amp/src/scaler.rs", &"//\n".repeat(501)),
            ("crates/amp/tests/fixtures/types.json", ""),
        ],
        expect![[r#"
            crates/amp/src/utils.rs: `utils` names no subject; name the file by what it is about
            crates/amp/src/helpers/mod.rs: `helpers` names no subject; name the file by what it is about
            crates/amp/src/scaler.rs: 501 lines; a file has at most 500: give the part that has a subject of its own its own file"#]],
    );
}

#[test]
fn unsafe_code_outside_its_place_is_caught() {
    check(
        &[
            ("crates/amp/src/lib.rs", "// SAFETY: none\nunsafe { f() }\n#![allow(unsafe_code)]\n"),
            ("crates/runtime/src/device.rs", "fn f() {\n    // SAFETY: none\n    unsafe { g() }\n}\n"),
            ("crates/amp/cpp/shim.cpp", ""),
            ("crates/runtime/cpp/versions.h", "#if TORCH_VERSION_MINOR >= 13\n"),
            ("crates/runtime/cpp/graph.cpp", "#include \"versions.h\"\n#if TORCH_VERSION_MINOR >= 13\n"),
        ],
        expect![[r#"
            crates/amp/src/lib.rs:2: `unsafe` outside of crates/files/src/, crates/kernels/src/, crates/runtime/src/sys.rs, crates/runtime/src/sys/
            crates/amp/src/lib.rs:3: allows `unsafe_code`; a crate that needs it states its own lints
            crates/runtime/src/device.rs:3: `unsafe` outside of crates/files/src/, crates/kernels/src/, crates/runtime/src/sys.rs, crates/runtime/src/sys/
            crates/amp/cpp/shim.cpp: C++ outside of crates/runtime/cpp
            crates/runtime/cpp/graph.cpp:2: asks for libtorch's version outside of crates/runtime/cpp/versions.h"#]],
    );
}

#[test]
fn unsafe_code_without_its_reason_is_caught() {
    let text = "\
fn a() {
    unsafe { f() }
    let x = unsafe { f() };
    // SAFETY: `f` has no preconditions.
    let y = unsafe { f() };
    // SAFETY: a comment of
    // two lines above an attribute
    #[rustfmt::skip]
    unsafe { f() }
}
unsafe impl Send for A {}
// SAFETY: A holds no reference.
unsafe impl Sync for A {}
/// Does it.
///
/// # Safety
/// The pointer is valid.
#[inline]
pub unsafe fn documented(p: *const u8) {}
pub unsafe fn undocumented(p: *const u8) {}
unsafe extern \"C\" {
    fn declared(f: unsafe extern \"C\" fn());
}
// the word unsafe in a comment, and \"unsafe { }\" in a string:
const S: &str = \"unsafe { f() }\";
unsafe extern \"C\" fn trampoline(p: *mut u8) {}
";
    check(
        &[("crates/runtime/src/sys/node.rs", text)],
        expect![[r#"
            crates/runtime/src/sys/node.rs:2: `unsafe` without `// SAFETY:` just above
            crates/runtime/src/sys/node.rs:3: `unsafe` without `// SAFETY:` just above
            crates/runtime/src/sys/node.rs:11: `unsafe` without `// SAFETY:` just above
            crates/runtime/src/sys/node.rs:20: `unsafe` without `// SAFETY:` just above
            crates/runtime/src/sys/node.rs:26: `unsafe` without `// SAFETY:` just above"#]],
    );
}

#[test]
fn paths_of_one_machine_are_caught() {
    let home = ["/ho", "me/someone/torch"].concat();
    check(
        &[
            ("crates/amp/src/lib.rs", &format!("const A: &str = \"{home}\";\n")),
            ("README.md", &format!("cd {home}\n")),
            ("data/set.json", &format!("{{\"from\": \"{home}\"}}")),
        ],
        expect![[r#"
            crates/amp/src/lib.rs:1: a path of one machine (/home/)
            README.md:1: a path of one machine (/home/)"#]],
    );
}
