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

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of parameters in the files on the hub, those of a tied matrix once.
    #[test]
    fn presets_have_the_parameters_of_their_files() {
        for (name, parameters) in [
            ("smollm2-135m", 134_515_008),
            ("smollm2-1.7b", 1_711_376_384),
            ("smollm3-3b", 3_075_098_624),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("mistral-7b", 7_248_023_552),
            ("olmo-2-7b", 7_298_617_344),
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-3-1b", 999_885_952),
            ("phi-3-mini", 3_821_079_552),
            ("phi-4-mini", 3_836_021_760),
        ] {
            assert_eq!(find(name).unwrap().parameters().unwrap(), parameters, "{name}");
        }
    }
}
