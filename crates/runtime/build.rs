//! Compiles the C++ shim against the libtorch that `torch-sys` found, and lets every dependant find that libtorch when
//! it runs under cargo.

use std::env;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const REMEDY: &str = "run `cargo xtask setup`, or set LIBTORCH to the folder of a libtorch with headers";

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if env::var_os("CARGO_FEATURE_CHECK_ONLY").is_some() {
        return;
    }
    let lib = PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is"));
    // For the build scripts of dependants: where a program finds libtorch after the checkout is gone.
    println!("cargo::metadata=LIBTORCH_LIB={}", lib.canonicalize().unwrap_or_else(|_| lib.clone()).display());
    let torch = lib.parent().expect("libtorch's lib folder has a parent");
    let include = torch.join("include");
    assert!(
        include.join("torch/csrc/autograd/function.h").exists(),
        "{} has no headers; {REMEDY}",
        torch.display()
    );

    let mut sources: Vec<PathBuf> = std::fs::read_dir("cpp")
        .expect("the shim's sources are beside this script")
        .map(|entry| entry.expect("the folder is readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    sources.sort();
    // One translation unit: libtorch's headers take ten seconds to parse, and each file would parse them again.
    let unit = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("shim.cpp");
    let includes = sources.iter().map(|source| {
        let name = source.file_name().and_then(|name| name.to_str()).expect("the shim's names are ASCII");
        format!("#include \"{name}\"\n")
    });
    std::fs::write(&unit, includes.collect::<String>()).expect("OUT_DIR is writable");
    cc::Build::new()
        .cpp(true)
        .file(&unit)
        .include("cpp")
        .flag("-isystem")
        .flag(include.to_str().expect("the include path is UTF-8"))
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").to_str().expect("the include path is UTF-8"))
        .flag("-std=c++17")
        .flag("-fopenmp")
        // RecordFunction has a debug-only field: without NDEBUG its layout differs from the library's.
        .define("NDEBUG", None)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .warnings(true)
        .flag("-Wno-unused-parameter")
        // Types of an unnamed namespace may be members of a class here: no other unit sees them.
        .flag("-Wno-subobject-linkage")
        .opt_level(2)
        .compile("frugal_shim");
    println!("cargo:rustc-link-lib=gomp");

    link_for_cargo_run(&lib);
}

/// Cargo adds a library search path to `LD_LIBRARY_PATH` of what it runs, doctests included, when the path lies in
/// its own target folder. A link there to libtorch serves every dependant, in any workspace, without an rpath.
fn link_for_cargo_run(lib: &Path) {
    let link = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("libtorch");
    let _ = std::fs::remove_file(&link);
    symlink(lib, &link).expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={}", link.display());
}
