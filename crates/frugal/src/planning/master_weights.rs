//! Whether a training of 16-bit weights keeps fp32 copies of them.

use accounting::candidates::{Job, SearchResult};
use models::DecoderConfig;
use tch::Kind;

use crate::config::{Config, MasterWeights};

/// A training's job and the ways to run a step of it, with or without master weights.
#[derive(Debug)]
pub struct Searched {
    /// [`MasterWeights::Always`], or another way that was asked for.
    pub master_weights: MasterWeights,
    /// Computation of a step.
    pub job: Job,
    /// The ways to run it.
    pub result: SearchResult,
}

/// Searches the ways to run a step, and decides between master weights and stochastic rounding where the configuration does not:
/// master weights where the fastest way that fits with them takes at most [`SLOWER`] times as long as the fastest without.
///
/// # Errors
/// Errors of `search`.
pub fn choose_master_weights<E>(
    config: &Config,
    kind: Kind,
    search: impl Fn(MasterWeights) -> Result<(Job, SearchResult), E>,
) -> Result<Searched, E> {
    let searched = |master_weights| {
        let (job, result) = search(master_weights)?;
        Ok(Searched { master_weights, job, result })
    };
    let configured = config.optimizer.master_weights;
    if configured != MasterWeights::Auto || !trains_half(config, kind) {
        return searched(configured);
    }
    let (copies, stochastic) = (searched(MasterWeights::Always)?, searched(MasterWeights::Stochastic)?);
    let seconds = |searched: &Searched| searched.result.chosen().map(|chosen| chosen.seconds);
    Ok(match (seconds(&copies), seconds(&stochastic)) {
        (Some(with), Some(without)) if with <= SLOWER * without => copies,
        (Some(_), None) => copies,
        _ => stochastic,
    })
}

/// Longest step with master weights, relative to one without: they leave less memory to activations or layers.
pub const SLOWER: f64 = 1.5;

/// Returns whether all weights are trained, in 16 bits.
pub fn trains_half(config: &Config, kind: Kind) -> bool {
    config.adapter.is_none() && matches!(kind, Kind::BFloat16 | Kind::Half)
}

/// Returns whether weights, gradients, optimizer state and master weights fit so many bytes, for a step that is not predicted. Ranks divide
/// state and master weights.
pub fn states_fit(config: &Config, shape: &DecoderConfig, ranks: usize, bytes: u64) -> bool {
    let (mut parameters, mut state) = (0u64, 0u64);
    for (name, sizes) in shape.shapes() {
        let numbers = sizes.iter().map(|size| size.unsigned_abs()).product::<u64>();
        parameters += numbers;
        // With a master copy.
        state += 4 * numbers + config.optimizer.rule.state_bytes(&name, &sizes);
    }
    parameters.saturating_mul(2 + 2).saturating_add(state / ranks.max(1) as u64) <= bytes
}

#[cfg(test)]
mod tests {
    use accounting::offload::AvailableMemory;
    use tch::Device;

    use super::*;
    use crate::config::OptimizerRule;
    use crate::planning::{self, DataShape, KnownRates};

    /// The shape of Qwen2.5-0.5B: 494 million weights.
    fn shape() -> DecoderConfig {
        DecoderConfig {
            num_key_value_heads: 2,
            tie_word_embeddings: true,
            ..DecoderConfig::qwen2(151_936, 896, 4864, 24, 14)
        }
    }

    fn chosen(config: &Config, kind: Kind, device: u64) -> Searched {
        let (shape, data) = (shape(), DataShape::uniform(1, 256, false));
        let rates = KnownRates::nominal(Device::Cpu).unwrap();
        let allowed = planning::allowed(config, 24, Device::Cpu).unwrap();
        let choice = choose_master_weights(config, kind, |master_weights| {
            let mut config = config.clone();
            config.optimizer.master_weights = master_weights;
            let job = planning::job(&config, &shape, (kind, Device::Cpu), &data, &rates)?;
            let choice = job.search(&allowed, AvailableMemory { device, host: None })?;
            Ok::<_, planning::NotPredicted>((job, choice))
        });
        choice.unwrap()
    }

    #[test]
    fn master_weights_are_kept_where_memory_allows() {
        let searched = |master_weights| {
            let mut config = Config { adapter: None, ..Config::default() };
            config.optimizer.master_weights = master_weights;
            config
        };
        let auto = searched(MasterWeights::Auto);
        let seconds = |way, device| {
            let searched = chosen(&searched(way), Kind::BFloat16, device);
            searched.result.chosen().map(|chosen| chosen.seconds)
        };
        for device in [9 << 30, 7 << 30, 1 << 30] {
            let (with, without) =
                (seconds(MasterWeights::Always, device), seconds(MasterWeights::Stochastic, device));
            let keeps = with.is_some_and(|with| without.is_none_or(|without| with <= SLOWER * without));
            let decided = chosen(&auto, Kind::BFloat16, device).master_weights;
            let expected = if keeps { MasterWeights::Always } else { MasterWeights::Stochastic };
            assert_eq!(decided, expected, "{device} bytes: {with:?} and {without:?}");
        }
        assert_eq!(chosen(&auto, Kind::BFloat16, u64::MAX).master_weights, MasterWeights::Always);
        // What fits nothing is as small as can be.
        let nothing = chosen(&auto, Kind::BFloat16, 1);
        assert!(nothing.result.chosen().is_none() && nothing.master_weights == MasterWeights::Stochastic);
        // Another choice is kept, and so is that of weights which need neither.
        for way in [MasterWeights::Always, MasterWeights::Never, MasterWeights::Stochastic] {
            assert_eq!(chosen(&searched(way), Kind::BFloat16, 1).master_weights, way);
        }
        assert_eq!(chosen(&auto, Kind::Float, 1).master_weights, MasterWeights::Auto);
    }

    #[test]
    fn states_of_a_step_without_a_prediction_are_counted() {
        let mut config = Config { adapter: None, ..Config::default() };
        let fit = |config: &Config, ranks, bytes| states_fit(config, &shape(), ranks, bytes);
        let parameters = 494_032_768;
        assert!(fit(&config, 1, 16 * parameters) && !fit(&config, 1, 16 * parameters - 1));
        assert!(fit(&config, 4, 7 * parameters) && !fit(&config, 4, 7 * parameters - 1));
        config.optimizer.rule = OptimizerRule::Sgd;
        assert!(fit(&config, 1, 8 * parameters) && !fit(&config, 1, 8 * parameters - 1));
        config.optimizer.rule = OptimizerRule::Lion;
        assert!(fit(&config, 1, 12 * parameters) && !fit(&config, 1, 12 * parameters - 1));
        // Norms and biases have 8 bytes, matrices 2 and a scale per 256 numbers; all have whole blocks.
        let small = 24 * (2 * 896 + 896 + 2 * 128) + 896;
        let state = 8 * small + 2 * (parameters - small) + (parameters - small) / 32;
        config.optimizer.rule = OptimizerRule::AdamW8bit;
        assert!(fit(&config, 1, 8 * parameters + state) && !fit(&config, 1, 8 * parameters + state - 1));
        // The embedding, which is the head too, has AdamW's state.
        config.optimizer.rule = OptimizerRule::Muon;
        let state = 4 * parameters + 4 * (151_936 * 896 + small);
        assert!(fit(&config, 1, 8 * parameters + state) && !fit(&config, 1, 8 * parameters + state - 1));
        config.optimizer.rule = OptimizerRule::Adafactor;
        assert!(fit(&config, 1, 8 * parameters + parameters / 100) && !fit(&config, 1, 8 * parameters));
    }
}
