//! Puts the guide's pictures into its chapters. On a forge's pages a chapter shows `![…](picture.svg)` from the file beside it; rustdoc
//! copies no files, so there the picture stands in the page, without its own colours for a dark background.

use std::path::Path;
use std::{env, fs};

fn main() {
    let guide = Path::new("src/guide");
    println!("cargo::rerun-if-changed={}", guide.display());
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    for entry in fs::read_dir(guide).expect("the guide is beside this script") {
        let path = entry.expect("a folder can be listed").path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let read = |path: &Path| {
            fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        let mut text = String::new();
        for line in read(&path).lines() {
            let picture =
                line.strip_prefix("![").and_then(|line| line.split_once("](")?.1.strip_suffix(".svg)"));
            match picture {
                None => text.push_str(line),
                Some(name) => {
                    let svg = read(&guide.join(format!("{name}.svg")));
                    text.extend(svg.lines().filter(|line| !line.starts_with("<style>")));
                }
            }
            text.push('\n');
        }
        let name = path.file_name().expect("a file has a name");
        fs::write(Path::new(&out).join(name), text).expect("OUT_DIR can be written");
    }
}
