//! The implementations of CPU computations, and the tests that run once for each.
//!
//! Which one a processor takes is decided by `kernels::processor`, libtorch and the libraries below it, and each can be
//! overridden, so a machine of one vendor tests what a machine of another would run.

/// Environment variables under which the tests run again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) name: &'static str,
    /// The features that the processor must have.
    needs: &'static str,
    pub(super) variables: &'static [(&'static str, &'static str)],
    /// The packages whose results depend on it.
    packages: &'static [&'static str],
    /// Further packages, with the tests that run again there: a part of each name.
    parts: &'static [(&'static str, &'static [&'static str])],
}

/// Where techniques meet: every pair of them, offloaded layers against resident ones, predicted peaks.
const COMPOSED: &[(&str, &[&str])] = &[
    ("frugal", &["every_pair_keeps_its_promises", "recomputation_packing_and_dora"]),
    ("frugal-cli", &["generate_budget"]),
    (
        "experiments",
        &[
            "everything_is_equal",
            "the_optimizer_on_the_host",
            "predicted_peaks::",
            "swiglu_ckpt_peak::",
            "fused_ce_baselines",
        ],
    ),
];

const BF16: &str = "bf16 products";
const INTEL: &str = "GenuineIntel";

/// Tests that run once, wherever they are, by a part of their names: nothing in them is computed otherwise under a choice.
const ONCE: &[&str] = &[
    // Ranks are processes, which take long to start.
    "collectives::",
    "vocabulary_parallel_processes::",
    // Files, names, and what is refused.
    "atomic_write::",
    "bad_input::",
    "bad_options::",
    "families_config::",
    "file::",
    "fuzz_",
    "hub::",
    "misuse::",
    "sharded::",
    "targets::",
    "writers::",
    // The graph, streams, memory and counters.
    "autograd",
    "counter",
    "device_choice::",
    "device_failures::",
    "device_pinned",
    "device_schedules::",
    "device_streams::",
    "device_synchronize::",
    "empty::",
    "mapped::",
    "measure::",
    "memory_limit::",
    "memory_region::",
    "scalers::",
    "set_grad::",
    "trace::",
    // Needs a GPU, or is interpreted.
    "cuda::",
    "device_graph::",
    "kernels_interpreted::",
];

/// The suite runs under the machine's own choice first.
pub(super) const CHOICES: [Choice; 3] = [
    // A processor without AVX-512.
    Choice {
        name: "avx2",
        needs: "avx2",
        variables: &[
            ("FRUGAL_SIMD", "avx2"),
            ("FRUGAL_LOW_PRECISION", "fp32"),
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ],
        packages: &["kernels", "models", "swiglu-ckpt", "amp", "fused-ce", "lora"],
        parts: COMPOSED,
    },
    // A processor that multiplies bf16 faster than fp32: AMD's with AVX-512, Intel's with AMX.
    Choice {
        name: BF16,
        needs: "avx512_bf16",
        variables: &[("FRUGAL_LOW_PRECISION", "bf16")],
        packages: &["models", "swiglu-ckpt", "amp", "fused-ce", "lora"],
        parts: COMPOSED,
    },
    // Another architecture.
    Choice {
        name: "no vector instructions",
        needs: "",
        variables: &[
            ("FRUGAL_SIMD", "scalar"),
            ("FRUGAL_LOW_PRECISION", "fp32"),
            ("ATEN_CPU_CAPABILITY", "default"),
        ],
        packages: &["kernels"],
        parts: &[],
    },
];

impl Choice {
    /// The arguments with which an executable of `package` runs under it; `None` where the executable does not depend on it.
    pub(super) fn arguments(&self, package: &str, executable: &str) -> Option<Vec<&'static str>> {
        let tests: &[&str] = if self.packages.contains(&package) {
            &[]
        } else {
            let (_, tests) = self.parts.iter().find(|(name, _)| *name == package && executable == "it")?;
            tests
        };
        let once = ONCE.iter().flat_map(|name| ["--skip", name]);
        Some(tests.iter().copied().chain(once).collect())
    }

    /// Whether the processor takes it by itself, as `kernels::processor` decides: the machine's own run has it then.
    pub(super) fn is_own(&self, flags: &str) -> bool {
        let has = |wanted| flags.split_whitespace().any(|flag| flag == wanted);
        let multiplies_bf16 = has("amx_bf16") || has("avx512_bf16") && !has(INTEL);
        self.name == BF16 && multiplies_bf16
    }

    /// Why it cannot run here; `flags` is what [`processor_flags`] returns.
    pub(super) fn missing(&self, flags: &str) -> Option<String> {
        let there = self.needs.is_empty() || flags.split_whitespace().any(|flag| flag == self.needs);
        (!there).then(|| format!("tests under `{}`: this processor has no {}", self.name, self.needs))
    }
}

/// The flags and the vendor of this machine's processor, as `/proc/cpuinfo` has them; empty where the system does not list them.
pub(super) fn processor_flags() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |name: &str| text.lines().find_map(|line| Some(line.strip_prefix(name)?.split_once(':')?.1));
    ["flags", "vendor_id"].iter().filter_map(|name| value(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_runs_what_depends_on_it() {
        let [avx2, bf16, scalar] = &CHOICES;
        let first = |choice: &Choice, package: &str| choice.arguments(package, "it").map(|all| all[0]);
        assert_eq!(first(avx2, "kernels"), Some("--skip"));
        assert_eq!(first(avx2, "frugal"), Some("every_pair_keeps_its_promises"));
        assert_eq!(
            (first(bf16, "kernels"), first(scalar, "frugal"), first(avx2, "report")),
            (None, None, None)
        );
        assert_eq!(avx2.arguments("frugal", "frugal"), None, "its unit tests");
    }

    #[test]
    fn a_choice_that_this_processor_cannot_take_says_what_is_missing() {
        let missing = |flags: &str| CHOICES.map(|choice| choice.missing(flags));
        assert_eq!(missing("sse avx avx2 avx512_bf16"), [None, None, None]);
        let [avx2, bf16, scalar] = missing("sse avx");
        assert_eq!(avx2.unwrap(), "tests under `avx2`: this processor has no avx2");
        assert_eq!(bf16.unwrap(), "tests under `bf16 products`: this processor has no avx512_bf16");
        assert_eq!(scalar, None);
    }

    #[test]
    fn what_the_processor_chooses_itself_does_not_run_twice() {
        let chosen = |flags: &str| CHOICES.map(|choice| choice.is_own(flags));
        assert_eq!(chosen("avx2 avx512_bf16 GenuineIntel"), [false; 3]);
        assert_eq!(chosen("avx2 avx512_bf16 AuthenticAMD"), [false, true, false]);
        assert_eq!(chosen("avx2 avx512_bf16 amx_bf16 GenuineIntel"), [false, true, false]);
    }
}
