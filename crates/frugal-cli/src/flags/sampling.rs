//! How the next token is chosen, by flags.

use clap::Args;
use models::generation::Sampling;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SamplingArgs {
    /// Sampling temperature; 0 for greedy decoding [default: 0, or 1 with --top-k or --top-p]
    #[arg(long, allow_negative_numbers = true, value_parser = temperature)]
    temperature: Option<f64>,
    /// Sample from the K most probable tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens with this total probability
    #[arg(long, value_name = "SHARE")]
    top_p: Option<f64>,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(temperature) if (0.0..f64::INFINITY).contains(&temperature) => Ok(temperature),
        _ => Err("expected a number above 0, or 0 for greedy decoding".to_owned()),
    }
}

impl SamplingArgs {
    /// Returns greedy decoding unless a flag asks for sampling.
    pub(crate) fn get(&self, seed: u64) -> Sampling {
        let cuts = self.top_k.is_some() || self.top_p.is_some();
        if self.temperature.map_or(!cuts, |temperature| temperature == 0.0) {
            return Sampling::Greedy;
        }
        Sampling::Random {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k,
            top_p: self.top_p.unwrap_or(1.0),
            seed,
        }
    }
}
