//! Seeded mutation tests for file readers.
//!
//! [`run`] repeats a test case with seeded random numbers, so that every failure is reproducible: 10 000 times, or the number in
//! the environment variable `FRUGAL_FUZZ_CASES`. A case mutates a valid file ([`bytes()`], [`json()`], [`text()`],
//! [`safetensors()`]), reads it, and returns whether the reader refused it. A panic, or more heap than [`within`] allows, fails
//! the test and prints the index of the case.

mod bytes;
mod json;
mod random;

use peak_alloc::PeakAlloc;

pub use bytes::{bytes, safetensors, text};
pub use json::json;
pub use random::Random;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The outcome of reading a mutated file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The reader returned an error.
    Refused,
    /// The reader accepted the file.
    Read,
}

impl Outcome {
    /// Returns `Read` for `Ok` and `Refused` for `Err`.
    pub fn of<T, E>(result: &Result<T, E>) -> Self {
        if result.is_ok() { Self::Read } else { Self::Refused }
    }
}

/// Runs a case 10 000 times, or the number in the environment variable `FRUGAL_FUZZ_CASES`. `FRUGAL_FUZZ_CASE` runs the
/// one case with this index.
///
/// # Panics
/// If a case panics, after printing its index; if all cases or none were refused, because such a test shows nothing.
pub fn run(name: &str, mut case: impl FnMut(&mut Random) -> Outcome) {
    let cases =
        std::env::var("FRUGAL_FUZZ_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000);
    // A single case, for debugging.
    let only: Option<u64> = std::env::var("FRUGAL_FUZZ_CASE").ok().and_then(|number| number.parse().ok());
    let mut refused = 0u64;
    // A panic that the reader catches prints no backtrace: its symbols would take more heap than any file.
    std::panic::set_hook(Box::new(|panic| report(&panic.to_string())));
    for number in only.map_or(0..cases, |only| only..only + 1) {
        let failing = Failing { name, number };
        refused += u64::from(case(&mut Random::new(number)) == Outcome::Refused);
        std::mem::forget(failing);
    }
    report(&format!("{name}: {refused} of {cases} cases were refused"));
    if only.is_none() {
        assert!(
            (1..cases).contains(&refused),
            "{name}: {refused} of {cases} cases were refused; expected some, not all"
        );
    }
}

/// Prints the index of a case that panics.
struct Failing<'a> {
    name: &'a str,
    number: u64,
}

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        let Self { name, number } = self;
        report(&format!(
            "{name}: case {number} failed; to run only this case, set FRUGAL_FUZZ_CASE={number}"
        ));
    }
}

#[allow(clippy::print_stderr, reason = "output of a test")]
fn report(line: &str) {
    eprintln!("{line}");
}

/// Runs a closure and checks that the heap grows by at most `allowed` bytes at any moment. Memory of other threads counts
/// too.
///
/// # Panics
/// If the heap grows by more.
pub fn within<T>(allowed: usize, read: impl FnOnce() -> T) -> T {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let result = read();
    let peak = HEAP.peak_usage().saturating_sub(before);
    assert!(peak <= allowed, "{peak} bytes of heap; the file's size allows {allowed}");
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_trusts_a_length_is_caught() {
        let trusting = || {
            run("trusting", |random| {
                let bytes = bytes(random, &8u64.to_le_bytes());
                let Some(length) = bytes.first_chunk() else { return Outcome::Refused };
                let length = usize::try_from(u64::from_le_bytes(*length).min(1 << 32)).unwrap();
                within(1 << 16, || drop(Vec::<u8>::with_capacity(length)));
                Outcome::Read
            });
        };
        let caught = std::panic::catch_unwind(trusting).unwrap_err();
        assert!(caught.downcast_ref::<String>().unwrap().ends_with("the file's size allows 65536"));
        let lazy = std::panic::catch_unwind(|| run("lazy", |_| Outcome::Refused)).unwrap_err();
        assert!(lazy.downcast_ref::<String>().unwrap().ends_with("expected some, not all"));
    }

    #[test]
    fn a_case_is_the_same_each_time() {
        let good = serde_json::json!({ "a": [1, 2.5, "x"], "b": { "c": null } });
        for seed in 0..200 {
            let once = || json(&mut Random::new(seed), &good);
            assert_eq!(once(), once());
        }
    }

    /// Each kind of mutation occurs among a thousand.
    #[test]
    fn every_kind_of_change_is_made() {
        let good = serde_json::json!({ "width": 4, "inner": { "name": "x" } });
        let texts: Vec<String> = (0..1000).map(|seed| json(&mut Random::new(seed), &good)).collect();
        let any = |holds: &dyn Fn(&str) -> bool| texts.iter().any(|text| holds(text));
        assert!(any(&|text| !text.contains("width")), "a deleted key");
        assert!(any(&|text| text.matches("\"width\":").count() == 2), "a key that comes twice");
        assert!(any(&|text| text.contains(&"[".repeat(1000))), "deep nesting");
        assert!(any(&|text| text.contains("1e400")), "a number beyond f64");
        assert!(any(&|text| text.contains("1000000000000000")), "a huge number");
        assert!(any(&|text| text.contains("\"width\":-")), "a negative number");
        assert!(any(&|text| serde_json::from_str::<serde_json::Value>(text).is_err()), "no JSON");
    }
}
