//! Profiling: traces of time ([`Trace`], [`range`]) and counts of work ([`Counter`]).
//!
//! ```
//! use runtime::profile::{self, Counter, Trace};
//! use tch::{Kind, Tensor, kind::FLOAT_CPU};
//!
//! let w = Tensor::randn([8, 4], FLOAT_CPU).set_requires_grad(true);
//! let x = Tensor::randn([16, 8], FLOAT_CPU);
//!
//! let trace = Trace::start(Default::default())?;
//! let counter = Counter::on_this_thread()?;
//! let loss = {
//!     let _range = profile::range("forward");
//!     x.matmul(&w).sum(Kind::Float)
//! };
//! {
//!     let _range = profile::range("backward");
//!     loss.backward();
//! }
//! let counts = counter.finish()?;
//! // 2·16·8·4 forward, as much again for the gradient of w, nothing for x, which needs none.
//! assert_eq!(counts.total.flops.dense, 2 * 2 * 16 * 8 * 4);
//! println!("{counts}");
//!
//! let folder = tempfile::tempdir()?;
//! trace.save(&folder.path().join("trace.json"))?; // for ui.perfetto.dev or chrome://tracing
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod counter;
mod counts;
mod range;
mod trace;

pub use counter::{Counter, Recompute, flops_of, is_counting, recompute, record_external};
pub use counts::{Counts, Flops, OpCounts, Work};
pub use range::{Range, kernel, range};
pub use trace::{Trace, TraceConfig};
