//! Lets a program that `cargo install` puts elsewhere find the libtorch that it was built with.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=FRUGAL_RELOCATABLE");
    // A program for other machines looks beside itself: `cargo xtask release`.
    if env::var_os("FRUGAL_RELOCATABLE").is_some() {
        return;
    }
    // Not there in a build that only checks the Rust code.
    if let Ok(lib) = env::var("DEP_FRUGAL_SHIM_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,{lib}");
    }
}
