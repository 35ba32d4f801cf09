//! The C++ compiler that builds the shim.

use std::ffi::OsString;

use anyhow::{Result, bail};

/// Looks where the `cc` crate looks: the `CXX` variables, then `c++` on the path.
pub(super) fn check(variable: impl Fn(&str) -> Option<OsString>) -> Result<()> {
    let target = format!("CXX_{}_unknown_linux_gnu", std::env::consts::ARCH);
    if ["CXX", "HOST_CXX", "TARGET_CXX", &target]
        .iter()
        .any(|name| variable(name).is_some_and(|v| !v.is_empty()))
    {
        return Ok(());
    }
    let path = variable("PATH").unwrap_or_default();
    let exists = |name: &str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    if exists("c++") {
        return Ok(());
    }
    match ["g++", "clang++"].into_iter().find(|name| exists(name)) {
        Some(other) => bail!("no C++ compiler is called c++ here, but there is {other}; export CXX={other}"),
        None => bail!(
            "no C++ compiler was found, and the bindings to libtorch are compiled with one; install it (Debian, Ubuntu: \
             sudo apt install g++; Fedora: sudo dnf install gcc-c++; macOS: xcode-select --install)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_is_found_by_variable_or_path() {
        let dir = tempfile::tempdir().unwrap();
        let with = |cxx: Option<&'static str>| {
            let path = dir.path().as_os_str().to_owned();
            check(move |name| match name {
                "CXX" => cxx.map(OsString::from),
                "PATH" => Some(path.clone()),
                _ => None,
            })
        };
        assert!(with(Some("g++-12")).is_ok());
        assert!(with(None).unwrap_err().to_string().contains("sudo apt install g++"));
        std::fs::write(dir.path().join("g++"), "").unwrap();
        assert!(with(None).unwrap_err().to_string().ends_with("export CXX=g++"));
        std::fs::write(dir.path().join("c++"), "").unwrap();
        assert!(with(None).is_ok());
    }
}
