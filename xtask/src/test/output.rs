//! Filters the output of test executables: drops what passing tests print, and collects the skipped tests.

/// A test without its data or device prints a line that starts with this.
const SKIPPED: &str = "skipped:";

/// Filters the lines of any number of test runs.
#[derive(Debug, Default)]
pub(super) struct Filter {
    /// Tests that passed, as the summaries count them.
    pub(super) passed: u64,
    /// Tests that failed.
    pub(super) failed: u64,
    skipped: Vec<String>,
    /// Inside the section that shows the output of passing tests.
    successes: bool,
    /// Whose output is being shown.
    test: Option<String>,
}

impl Filter {
    /// Returns the line if it is to be shown.
    pub(super) fn line<'a>(&mut self, line: &'a str) -> Option<&'a str> {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.successes = false;
            self.passed += counted(counts, "passed");
            self.failed += counted(counts, "failed");
            return Some(line);
        }
        match line {
            "successes:" => self.successes = true,
            "failures:" => self.successes = false,
            _ => {}
        }
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.test = Some(test.to_owned());
        }
        if let Some(reason) = line.trim_start().strip_prefix(SKIPPED) {
            let test = self.test.as_deref().unwrap_or("a test");
            self.skip(format!("{test}: {}", reason.trim()));
        }
        if let Some((test, reason)) = ignored(line) {
            self.skip(format!("{test}: {reason}"));
        }
        (!self.successes).then_some(line)
    }

    /// Records a skipped test once: it may run under several choices.
    pub(super) fn skip(&mut self, reason: String) {
        if !self.skipped.contains(&reason) {
            self.skipped.push(reason);
        }
    }

    /// `test: reason` of each test that was skipped or ignored.
    pub(super) fn skipped(&self) -> &[String] {
        &self.skipped
    }
}

/// `12` of `ok. 12 passed; 0 failed; …` for the word `passed`.
fn counted(counts: &str, word: &str) -> u64 {
    let before = counts.split([';', '.']).find_map(|part| part.trim().strip_suffix(word));
    before.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// The test and the reason in a line like `test name ... ignored, reason`.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (test, how) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let reason = how.strip_prefix("ignored")?.trim_start_matches(',').trim();
    Some((test, if reason.is_empty() { "ignored" } else { reason }))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn check(output: &str, expected: Expect) {
        let mut filter = Filter::default();
        let shown: Vec<&str> = output.lines().filter_map(|line| filter.line(line)).collect();
        let skipped = filter.skipped().join("\n");
        expected.assert_eq(&format!(
            "{}\n=== {} passed, {} failed; skipped:\n{skipped}\n",
            shown.join("\n"),
            filter.passed,
            filter.failed
        ));
    }

    #[test]
    fn output_of_passing_tests_is_left_out_but_for_what_they_skipped() {
        check(
            "running 3 tests\ntest a ... ok\ntest b ... ok\ntest c ... ignored, wants a GPU\n\nsuccesses:\n\n---- a stdout \
             ----\nmuch talk\n\n---- b stdout ----\nskipped: no WikiText-2 here\n\n\nsuccesses:\n    a\n    b\n\ntest \
             result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n\nrunning 1 \
             test\ntest d ... ok",
            expect![[r#"
                running 3 tests
                test a ... ok
                test b ... ok
                test c ... ignored, wants a GPU

                test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

                running 1 test
                test d ... ok
                === 2 passed, 0 failed; skipped:
                c: wants a GPU
                b: no WikiText-2 here
            "#]],
        );
    }

    #[test]
    fn output_of_failing_tests_is_shown() {
        check(
            "test a ... ok\ntest b ... FAILED\n\nsuccesses:\n\n---- a stdout ----\ntalk\n\nsuccesses:\n    a\n\nfailures:\n\n---- b stdout ----\nleft: 1\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored",
            expect![[r#"
                test a ... ok
                test b ... FAILED

                failures:

                ---- b stdout ----
                left: 1

                failures:
                    b

                test result: FAILED. 1 passed; 1 failed; 0 ignored
                === 1 passed, 1 failed; skipped:

            "#]],
        );
    }
}
