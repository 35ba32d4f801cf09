//! Results on standard output.

use std::io::Write;

/// Writes a text at once.
///
/// # Errors
/// Nobody reads it.
#[allow(clippy::print_stdout, reason = "the result of a program goes to standard output")]
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}
