//! How far autocast in bf16 is from the exact loss and gradients.
//!
//! The GPT-2-like model of `data/fixtures/gpt2_like`, with the weights and batches of the fixture. For the loss, and for the
//! gradient of each weight, with e the exact value (the same model in fp64) and f what bf16 gives, over all batches B:
//!
//! error = √(Σ_B ‖f − e‖² / Σ_B ‖e‖²)
//!
//! PyTorch's `torch.autocast` computes the same of itself (`xtask/peers/amp.py`), with a fp64 oracle of its own, and the two
//! are compared tensor by tensor. Which of two roundings is luckier differs from tensor to tensor, so that the comparison
//! allows for one rounding beside PyTorch's error, and the ratio without that is reported too.

use std::collections::BTreeMap;
use std::path::Path;

use amp::Autocast;
use anyhow::Result;
use models::module::{Context, Input, LanguageModel, trainable};
use models::state_dict::load_state_dict;
use models::{Gpt2Like, Gpt2LikeConfig, tensors_file};
use tch::{Device, Kind, Tensor};
use training::loss::LmCrossEntropyLoss;

/// The name that the loss goes by, beside those of the weights.
pub(crate) const LOSS: &str = "loss";

/// The name of all gradients, taken as one vector.
pub(crate) const ALL: &str = "all gradients";

/// The error of the loss, of each weight's gradient, and of all gradients together under autocast in `dtype`, by name.
///
/// # Errors
/// A folder without the fixture; those of the model.
pub(crate) fn run(folder: &Path, dtype: Kind) -> Result<Vec<(String, f64)>> {
    let fixture = Fixture::read(folder)?;
    let (exact, low) = (fixture.model(Kind::Double)?, fixture.model(Kind::Float)?);
    let autocast = Autocast::new(dtype)?;
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for batch in 0..fixture.tensor("tokens")?.size().first().copied().unwrap_or(0) {
        let exact = fixture.figures(&exact, batch)?;
        let gradients = {
            let _scope = autocast.enter();
            fixture.figures(&low, batch)?
        };
        for ((name, gradients), (_, exact)) in gradients.into_iter().zip(exact) {
            let square =
                |t: &Tensor| -> Result<f64> { Ok(t.f_square()?.f_sum(Kind::Double)?.f_double_value(&[])?) };
            let (error, norm) = (square(&gradients.f_sub(&exact)?)?, square(&exact)?);
            let sum = sums.entry(name).or_default();
            *sum = (sum.0 + error, sum.1 + norm);
        }
    }
    let gradients = sums.iter().filter(|(name, _)| *name != LOSS).map(|(_, sum)| *sum);
    let all = gradients.fold((0.0, 0.0), |all, sum| (all.0 + sum.0, all.1 + sum.1));
    sums.insert(ALL.to_owned(), all);
    Ok(sums.into_iter().map(|(name, (error, norm))| (name, (error / norm).sqrt())).collect())
}

struct Fixture {
    config: Gpt2LikeConfig,
    tensors: Vec<(String, Tensor)>,
}

impl Fixture {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let refuse = |reason: String| {
            let reason = format!("{reason}; give the folder of the fixture gpt2_like");
            training::Error::file(&path, reason)
        };
        let text = std::fs::read_to_string(&path).map_err(|cause| refuse(cause.to_string()))?;
        let config = serde_json::from_str(&text).map_err(|cause| refuse(cause.to_string()))?;
        let tensors = tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu)?;
        Ok(Self { config, tensors })
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor).ok_or_else(|| {
            training::Error::file("cases.safetensors", format!("it has no tensor `{name}`")).into()
        })
    }

    fn model(&self, kind: Kind) -> Result<Gpt2Like> {
        let model =
            Gpt2Like::new(&Gpt2LikeConfig { dropout: 0.0, ..self.config.clone() }, (kind, Device::Cpu))?;
        let weights =
            self.tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("param.")?, tensor)));
        let weights = weights
            .map(|(name, tensor)| Ok((name.to_owned(), tensor.f_to_kind(kind)?)))
            .collect::<Result<Vec<_>>>()?;
        load_state_dict(&model, &weights, "the fixture")?;
        Ok(model)
    }

    /// Loss and gradients of one batch, in fp64.
    fn figures(&self, model: &Gpt2Like, batch: i64) -> Result<Vec<(String, Tensor)>> {
        let (tokens, lengths) = (self.tensor("tokens")?.f_get(batch)?, self.tensor("lengths")?.f_get(batch)?);
        let context = Context { training: true, ..Context::default() };
        let logits = model.logits(&Input { context, ..Input::new(&tokens) })?;
        let loss = LmCrossEntropyLoss::default().with_lengths(&logits, &tokens, &lengths)?;
        runtime::autograd::backward(&[&loss])?;
        let mut figures = vec![(LOSS.to_owned(), loss.f_detach()?.f_to_kind(Kind::Double)?)];
        for (name, weight) in trainable(model) {
            figures.push((name, weight.f_grad()?.f_to_kind(Kind::Double)?));
            runtime::autograd::set_grad(weight, None)?;
        }
        Ok(figures)
    }
}
