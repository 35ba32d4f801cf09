//! CUDA C++ text, compiled for the interpreter.

use std::collections::HashMap;

use kernels::nvrtc::{self, Emitted};
use ptx::{Kernel, Module};

/// The source of an operation's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source(pub(super) &'static str);

pub(super) const ADAM: Source = Source(include_str!("../../../src/adam/adam.cuh"));
pub(super) const CROSS_ENTROPY: Source = Source(include_str!("../../../src/cross_entropy/cross_entropy.cuh"));
pub(super) const DROPOUT: Source = Source(include_str!("../../../src/dropout/dropout.cuh"));
pub(super) const GRADIENTS: Source = Source(include_str!("../../../src/gradients/gradients.cuh"));
pub(super) const LOSS_SCALE: Source = Source(include_str!("../../../src/loss_scale/loss_scale.cuh"));
pub(super) const NF4: Source = Source(include_str!("../../../src/nf4/nf4.cuh"));
pub(super) const NORM: Source = Source(include_str!("../../../src/norm/norm.cuh"));
pub(super) const ROPE: Source = Source(include_str!("../../../src/rope/rope.cuh"));
pub(super) const SCALE: Source = Source(include_str!("../../../src/gradients/scale.cuh"));
pub(super) const STOCHASTIC_ROUNDING: Source =
    Source(include_str!("../../../src/stochastic_rounding/stochastic_rounding.cuh"));
pub(super) const SWIGLU: Source = Source(include_str!("../../../src/swiglu/swiglu.cuh"));
pub(super) const PRELUDE: &str = include_str!("../../../src/cuda/prelude.cuh");

/// Kernels that are ready to run.
pub(super) struct Program {
    module: Module,
    names: HashMap<String, String>,
}

/// Returns whether NVRTC exists, and prints a message if not. Repeated runs for other CPU implementations skip these tests, which
/// do not depend on them.
pub(super) fn is_available() -> bool {
    if let Some(choice) = std::env::var_os("FRUGAL_SIMD") {
        eprintln!("skipped: these kernels do not depend on FRUGAL_SIMD={}", choice.display());
        return false;
    }
    match nvrtc::version() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// Machine code and PTX of some kernels for an architecture such as 80.
pub(super) fn emit(source: &str, prelude: &str, expressions: &[&str], architecture: u32) -> Emitted {
    let options =
        [format!("--gpu-architecture=sm_{architecture}"), "-std=c++17".into(), "--ptxas-options=-v".into()];
    nvrtc::compile(source, &[("prelude.cuh", prelude)], expressions, &options)
        .unwrap_or_else(|error| panic!("{expressions:?}: {error}"))
}

impl Program {
    /// Compiles kernels of a file; `None`, with a message on standard error, without NVRTC.
    pub(super) fn of(source: Source, expressions: &[String]) -> Option<Self> {
        is_available().then(|| Self::from_text(source.0, PRELUDE, expressions))
    }

    pub(super) fn from_text(source: &str, prelude: &str, expressions: &[String]) -> Self {
        let mut wanted: Vec<&str> = expressions.iter().map(String::as_str).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let emitted = emit(source, prelude, &wanted, 80);
        let module = Module::parse(&emitted.ptx).unwrap_or_else(|error| panic!("{error}"));
        let names = wanted.iter().map(|name| (*name).to_owned()).zip(emitted.names).collect();
        Self { module, names }
    }

    pub(super) fn kernel(&self, expression: &str) -> &Kernel {
        let name = self.names.get(expression).unwrap_or_else(|| panic!("{expression} was not compiled"));
        self.module.kernel(name).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The C++ type of a dtype.
pub(super) fn type_of(kind: tch::Kind) -> &'static str {
    match kind {
        tch::Kind::Float => "float",
        tch::Kind::BFloat16 => "bf16",
        tch::Kind::Half => "f16",
        other => panic!("{other:?} has no kernel"),
    }
}
