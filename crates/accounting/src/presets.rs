//! Known models by name: those of [`decoder::PRESETS`].

use decoder::PRESETS;

use crate::Error;
use crate::model::Decoder;

/// Returns the names of all known models.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// Returns the model of that name, whatever its case.
///
/// ```
/// let model = accounting::presets::find("gpt2")?;
/// assert_eq!(model.parameters()?, 124_439_808);
/// assert!(accounting::presets::find("gpt5").unwrap_err().to_string().starts_with("unknown model `gpt5`; known are: gpt2, "));
/// # Ok::<(), accounting::Error>(())
/// ```
pub fn find(name: &str) -> Result<Decoder, Error> {
    let known = PRESETS.iter().find(|preset| preset.name.eq_ignore_ascii_case(name));
    Decoder::new(known.ok_or_else(|| Error::unknown("model", name, names()))?.sizes)
}
