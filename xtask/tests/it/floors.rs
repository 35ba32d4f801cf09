//! The picture of ARCHITECTURE.md, crates by floor, drawn from the manifests, so that it is never out of date; and the packages that come
//! with one technique.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use expect_test::expect_file;
use serde_json::Value;

const WIDTH: usize = 940;
const BOX: (usize, usize) = (112, 26);
const FLOOR: usize = 62;
const LEFT: usize = 8;

/// The crates of the workspace, and the packages that each is built from.
struct Workspace(BTreeMap<String, BTreeSet<String>>);

impl Workspace {
    fn read() -> Self {
        let output = Command::new(env!("CARGO"))
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
            .output()
            .expect("cargo runs");
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata writes JSON");
        let packages = metadata["packages"].as_array().expect("a list of packages");
        let built = |package: &Value| {
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
            normal.filter_map(|dependency| dependency["name"].as_str().map(str::to_owned)).collect()
        };
        let name = |package: &Value| package["name"].as_str().expect("a name").to_owned();
        Self(packages.iter().map(|package| (name(package), built(package))).collect())
    }

    /// The dependencies of a crate within the workspace.
    fn below<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.0[name].iter().filter(|name| self.0.contains_key(*name)).map(String::as_str)
    }

    /// Whether a crate is reached from another one, perhaps through others.
    fn reaches(&self, from: &str, to: &str) -> bool {
        self.below(from).any(|next| next == to || self.reaches(next, to))
    }

    fn links_libtorch(&self, name: &str) -> bool {
        self.0[name].contains("tch") || self.below(name).any(|next| self.links_libtorch(next))
    }

    /// 0 for a crate without dependencies in the workspace, else one more than the highest of them.
    fn floor(&self, name: &str) -> usize {
        self.below(name).map(|next| self.floor(next) + 1).max().unwrap_or(0)
    }

    /// The arrows that no longer way explains.
    fn arrows(&self) -> Vec<(&str, &str)> {
        let direct = self.0.keys().flat_map(|from| self.below(from).map(move |to| (from.as_str(), to)));
        direct
            .filter(|(from, to)| !self.below(from).any(|other| other != *to && self.reaches(other, to)))
            .collect()
    }
}

/// Places every floor's crates beside each other, each near what it stands on.
fn places(workspace: &Workspace) -> BTreeMap<&str, (usize, usize)> {
    let top = workspace.0.keys().map(|name| workspace.floor(name)).max().unwrap_or(0);
    let mut places: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for floor in 0..=top {
        let mut names: Vec<&str> =
            workspace.0.keys().map(String::as_str).filter(|name| workspace.floor(name) == floor).collect();
        names.sort_by_key(|name| {
            let columns: Vec<usize> = workspace.below(name).map(|next| places[next].0).collect();
            (columns.iter().sum::<usize>() / columns.len().max(1), *name)
        });
        let share = (WIDTH - LEFT) / names.len();
        for (index, name) in names.into_iter().enumerate() {
            let x = LEFT + index * share + share.saturating_sub(BOX.0) / 2;
            places.insert(name, (x, 10 + (top - floor) * FLOOR));
        }
    }
    places
}

fn picture(workspace: &Workspace) -> String {
    let places = places(workspace);
    let height = 20 + BOX.1 + places.values().map(|place| place.1).max().unwrap_or(0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\" \
         text-anchor=\"middle\" role=\"img\">\n<title>Crates by floor; arrows point to what a crate is built on</title>\n\
         <style>text{{fill:#222}}path{{stroke:#999;fill:none}}.torch{{fill:#dbe7f5;stroke:#4477aa}}.plain{{fill:#f4f1e6;stroke:#998855}}\n\
         @media(prefers-color-scheme:dark){{text{{fill:#eee}}path{{stroke:#777}}.torch{{fill:#1f3a57}}.plain{{fill:#3d3826}}}}</style>\n"
    );
    for (from, to) in workspace.arrows() {
        let ((x1, y1), (x2, y2)) = (places[from], places[to]);
        let (x1, y1, x2) = (x1 + BOX.0 / 2, y1 + BOX.1, x2 + BOX.0 / 2);
        let _ = writeln!(
            svg,
            "<path d=\"M{x1} {y1} C{x1} {} {x2} {} {x2} {y2}\"/>",
            y1 + 24,
            y2.saturating_sub(24)
        );
    }
    for (name, (x, y)) in &places {
        let class = if workspace.links_libtorch(name) { "torch" } else { "plain" };
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"4\"/><text x=\"{}\" y=\"{}\">{name}</text>",
            BOX.0,
            BOX.1,
            x + BOX.0 / 2,
            y + 18
        );
    }
    svg + "</svg>\n"
}

/// `UPDATE_EXPECT=1 cargo test -p xtask --test it floors` draws it anew.
#[test]
fn the_picture_of_the_floors_is_of_the_manifests() {
    expect_file!["../../floors.svg"].assert_eq(&picture(&Workspace::read()));
}

#[test]
fn importing_one_technique_compiles_no_reader_and_no_tokenizer() {
    const TECHNIQUES: [&str; 6] = ["amp", "fused-ce", "lora", "offload", "sharding", "swiglu-ckpt"];
    let alone = TECHNIQUES.map(|technique| vec!["-p", technique]);
    let features = TECHNIQUES.map(|name| vec!["-p", "frugal", "--no-default-features", "--features", name]);
    for technique in alone.into_iter().chain(features) {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "-e", "normal", "--prefix", "none"])
            .args(&technique)
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
            .output()
            .expect("cargo runs");
        let tree = String::from_utf8(output.stdout).expect("cargo tree writes UTF-8");
        let packages: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
        assert!(packages.contains("runtime"), "{technique:?}: {}", String::from_utf8_lossy(&output.stderr));
        for reader in ["parquet", "tokenizers", "minijinja", "csv", "clap"] {
            assert!(!packages.contains(reader), "{technique:?} compiles {reader}");
        }
    }
}
