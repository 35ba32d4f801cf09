//! For tests: seeded mutation of files, and ranks.
//!
//! [`fuzz`] mutates valid files and checks that a reader refuses or reads each of them within bounded memory.
//! `ranks` (feature `ranks`, which links libtorch) starts a test executable as several processes.
//!
//! Use it under `dev-dependencies` only: it installs an allocator that counts the bytes of the heap.
//!
//! ```
//! use testing::fuzz;
//!
//! let good = r#"{ "width": 4 }"#;
//! fuzz::run("widths", |random| {
//!     let text = fuzz::json(random, &serde_json::from_str(good).unwrap());
//!     let read = fuzz::within(64 * text.len() + (1 << 16), || serde_json::from_str::<serde_json::Value>(&text));
//!     fuzz::Outcome::of(&read)
//! });
//! ```

pub mod fuzz;
#[cfg(feature = "ranks")]
pub mod ranks;
