//! Which of the linked test executables can run before the build has ended.

use std::collections::BTreeSet;

use crate::cargo::Executable;

/// Holds a package's tests back until its program is linked, which they start: cargo may link the tests first.
pub(super) struct Linked {
    /// Packages whose program is not linked yet.
    without_program: BTreeSet<String>,
    waiting: Vec<Executable>,
}

impl Linked {
    pub(super) fn new(packages_with_programs: BTreeSet<String>) -> Self {
        Self { without_program: packages_with_programs, waiting: Vec::new() }
    }

    /// Returns the tests that can run now that cargo has linked `executable`.
    pub(super) fn runnable(&mut self, executable: Executable) -> Vec<Executable> {
        if !executable.test {
            self.without_program.remove(&executable.package);
            return self.waiting.extract_if(.., |test| test.package == executable.package).collect();
        }
        if self.without_program.contains(&executable.package) {
            self.waiting.push(executable);
            return Vec::new();
        }
        vec![executable]
    }

    /// Returns the tests that are still held at the end of the build: cargo links a program only for integration tests.
    pub(super) fn rest(&mut self) -> Vec<Executable> {
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_wait_for_their_packages_program() {
        let executable = |name: &str, package: &str, test: bool| Executable {
            name: name.into(),
            package: package.into(),
            test,
            path: "/t".into(),
        };
        let names = |tests: Vec<Executable>| tests.into_iter().map(|test| test.name).collect::<Vec<_>>();
        let mut linked = Linked::new(["frugal".into(), "xtask".into()].into());
        assert_eq!(names(linked.runnable(executable("it", "lora", true))), ["it"]);
        assert!(linked.runnable(executable("it", "frugal", true)).is_empty());
        assert!(linked.runnable(executable("xtask-bin", "xtask", true)).is_empty());
        assert_eq!(names(linked.runnable(executable("frugal", "frugal", false))), ["it"]);
        assert_eq!(names(linked.runnable(executable("frugal", "frugal", true))), ["frugal"]);
        assert_eq!(names(linked.rest()), ["xtask-bin"]);
        assert!(linked.rest().is_empty());
    }
}
