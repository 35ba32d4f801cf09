//! The building blocks, compared with formulas and their documentation.

use models::module::{self, Context, Input, LanguageModel, Module, ModuleMapper, Projection, map_modules};
use models::state_dict::{load, load_state_dict, save, state_dict};
use models::{
    Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig, Init, LayerNorm, Linear, NormKernel, PositionalEncoding,
    RmsNorm,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

fn small() -> Gpt2Config {
    Gpt2Config { vocabulary: 40, max_sequence: 12, hidden: 8, heads: 2, layers: 2, ..Gpt2Config::small() }
}

fn small_like() -> Gpt2LikeConfig {
    Gpt2LikeConfig {
        vocab_size: 40,
        embedding_dim: 6,
        hidden_dim: 8,
        num_heads: 2,
        ff_dim: 12,
        max_length: 12,
        dropout: 0.0,
        ..Default::default()
    }
}

#[test]
fn the_variance_of_the_output_does_not_depend_on_the_width() {
    let variance = |init: fn(i64) -> Init, width: i64| {
        let layer = Linear::with_init(width, 512, None, init(width), F32).unwrap();
        let x = Tensor::randn([256, width], F32);
        layer.forward(&x, &Context::default()).unwrap().var(false).double_value(&[])
    };
    // Each with its documented variance; that of 131072 samples deviates by less than one or two percent.
    type Case = (&'static str, fn(i64) -> Init, f64);
    let cases: [Case; 2] =
        [("1/√d, cut at 3", Init::lecun, 0.9733), ("torch", Init::torch_linear, 1.0 / 3.0)];
    for (name, init, expected) in cases {
        for width in [16, 64, 256, 1024] {
            let found = variance(init, width);
            // Narrow layers have few weights: their sample variance deviates by √(2/(512·width)).
            let tolerance = expected * (0.02 + 5.0 * (2.0 / (512.0 * width as f64)).sqrt());
            assert!((found - expected).abs() < tolerance, "{name} at width {width}: {found}");
        }
    }
    // With a standard normal instead, the variance grows with the width.
    let grown = variance(|_| Init::Normal { std: 1.0 }, 1024);
    assert!(grown > 900.0, "{grown}");
}

#[test]
fn a_truncated_normal_stays_within_its_bounds() {
    let draw = Init::TruncatedNormal { std: 0.5, cut: 2.0 }.parameter(&[200_000], F32).unwrap().detach();
    assert!(draw.abs().max().double_value(&[]) <= 1.0);
    // Var = σ²·(1 − 2·cut·φ(cut)/(2Φ(cut) − 1)) = 0.7737·σ² for a cut at 2.
    let variance = draw.var(false).double_value(&[]) / 0.25;
    assert!((variance - 0.7737).abs() < 0.01, "{variance}");
    assert!(draw.mean(Kind::Float).double_value(&[]).abs() < 0.005);
}

#[test]
fn xavier_balances_both_directions() {
    let init = Init::xavier_uniform(300, 500);
    let found = init.parameter(&[500, 300], F32).unwrap().detach().var(false).double_value(&[]);
    assert!((found / (2.0 / 800.0) - 1.0).abs() < 0.03, "{found}");
}

#[test]
fn positions_follow_the_closed_form() {
    for width in [6i64, 7] {
        let encoding = PositionalEncoding::new(50, width, F64).unwrap();
        let x = Tensor::zeros([1, 50, width], F64);
        let table = encoding.forward(&x, None).unwrap();
        for position in 0..50i64 {
            for column in 0..width {
                let angle = position as f64 / 10_000f64.powf((column - column % 2) as f64 / width as f64);
                let expected = if column % 2 == 0 { angle.sin() } else { angle.cos() };
                assert!(
                    (table.double_value(&[0, position, column]) - expected).abs() < 1e-12,
                    "{position} {column}"
                );
            }
        }
        let positions = Tensor::from_slice(&[3i64, 0, 49]).view([1, 3]);
        let picked = encoding.forward(&x.narrow(1, 0, 3), Some(&positions)).unwrap();
        assert_eq!(picked, table.index_select(1, &positions.view([3])));
    }
}

#[test]
fn norms_follow_their_formulas() {
    let x = Tensor::randn([4, 6], F64);
    let (mut layer, rms) = (LayerNorm::new(6, 1e-5, F64).unwrap(), RmsNorm::new(6, 1e-5, F64).unwrap());
    let _no_grad = tch::no_grad_guard();
    let _ = layer.weight.shallow_clone().uniform_(0.5, 2.0);
    let _ = layer.bias.shallow_clone().uniform_(-1.0, 1.0);
    let _ = rms.weight.shallow_clone().uniform_(0.5, 2.0);
    let centred = &x - x.mean_dim([1i64].as_slice(), true, Kind::Double);
    let variance = centred.square().mean_dim([1i64].as_slice(), true, Kind::Double);
    let expected = centred / (variance + 1e-5).sqrt() * &layer.weight + &layer.bias;
    for kernel in [NormKernel::Fused, NormKernel::Libtorch] {
        layer.kernel = kernel;
        let error = (layer.forward(&x).unwrap() - &expected).abs().max().double_value(&[]);
        assert!(error < 1e-12, "{kernel:?}: {error}");
    }
    let expected =
        &x / (x.square().mean_dim([1i64].as_slice(), true, Kind::Double) + 1e-5).sqrt() * &rms.weight;
    assert!((rms.forward(&x).unwrap() - expected).abs().max().double_value(&[]) < 1e-12);
}

#[test]
fn a_state_round_trips_through_a_file_and_loads_in_any_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = Gpt2::new(&small(), F32).unwrap();
    save(&model, &path).unwrap();
    let other = Gpt2::new(&small(), F32).unwrap();
    load(&other, &path).unwrap();
    for ((name, a), (_, b)) in state_dict(&model).iter().zip(&state_dict(&other)) {
        assert_eq!(a, b, "{name}");
    }
    // The head shares the embedding's weights: the file has them once, and both change together.
    assert!(state_dict(&other).iter().all(|(name, _)| name != "lm_head.weight"));
    let tokens = Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]);
    assert_eq!(model.logits(&Input::new(&tokens)).unwrap(), other.logits(&Input::new(&tokens)).unwrap());

    let wide = Gpt2::new(&small(), F64).unwrap();
    load(&wide, &path).unwrap();
    assert_eq!(state_dict(&wide)[0].1.kind(), Kind::Double);
}

#[test]
fn a_mismatched_state_changes_nothing_and_names_the_cause() {
    let model = Gpt2Like::new(&small_like(), F32).unwrap();
    let mut state: Vec<_> =
        state_dict(&model).into_iter().map(|(name, tensor)| (name, tensor.zeros_like())).collect();
    state.retain(|(name, _)| name != "decoder.norm2.bias");
    state.push(("decoder.norm4.bias".to_owned(), Tensor::zeros([8], F32)));
    state[0].1 = Tensor::zeros([41, 6], F32);
    let before = state_dict(&model)[1].1.copy();
    let error = load_state_dict(&model, &state, "other.safetensors").unwrap_err();
    assert_eq!(
        error.to_string(),
        "other.safetensors does not fit the model: missing decoder.norm2.bias; unexpected decoder.norm4.bias; of another \
         shape embedding.weight [41, 6] (expected [40, 6])"
    );
    assert_eq!(state_dict(&model)[1].1, before);
}

#[test]
fn broken_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = Gpt2Like::new(&small_like(), F32).unwrap();
    save(&model, &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = load(&model, &path).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: not a complete safetensors file ("), "{length}: {error}");
    }
    let error = load(&model, &folder.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("none: No such file"), "{error}");
}

#[test]
fn parameters_are_frozen_by_pattern() {
    let model = Gpt2::new(&small(), F32).unwrap();
    let names = module::freeze(&model, r"h\.0\..*", true).unwrap();
    assert_eq!(names.len(), 12);
    let count = module::parameter_count(&model);
    assert_eq!(count.total - count.trainable, 12 * 64 + 13 * 8);
    assert!(module::trainable(&model).iter().all(|(name, _)| !name.starts_with("h.0.")));
    let error = module::freeze(&model, "decoder", true).unwrap_err().to_string();
    assert_eq!(
        error,
        "the pattern `decoder` for parameter names: it matches no parameter; the first are wte.weight, wpe.weight, \
         h.0.ln_1.weight, h.0.ln_1.bias, h.0.attn.c_attn.weight, h.0.attn.c_attn.bias, h.0.attn.c_proj.weight, \
         h.0.attn.c_proj.bias"
    );
    assert!(module::freeze(&model, "(", true).is_err());
}

#[derive(Debug)]
struct Doubled(Box<dyn Projection>);

impl Module for Doubled {
    fn visit<'a>(&'a self, visitor: &mut module::Visitor<'a, '_>) {
        visitor.part("base", &*self.0);
    }

    fn visit_mut(&mut self, visitor: &mut module::VisitorMut<'_>) -> models::Result<()> {
        visitor.part("base", &mut *self.0)
    }
}

impl Projection for Doubled {
    fn forward(&self, x: &Tensor, context: &Context<'_>) -> models::Result<Tensor> {
        Ok(self.0.forward(x, context)? * 2.0)
    }
    fn in_features(&self) -> i64 {
        self.0.in_features()
    }
    fn out_features(&self) -> i64 {
        self.0.out_features()
    }
}

/// Puts [`Doubled`] around the projections of this name.
struct Double(&'static str);

impl ModuleMapper for Double {
    fn projection(&mut self, name: &str, slot: &mut Box<dyn Projection>) -> models::Result<()> {
        if name == self.0 {
            let base: Box<dyn Projection> = std::mem::replace(slot, Box::new(Linear::new(1, 1, false, F32)?));
            *slot = Box::new(Doubled(base));
        }
        Ok(())
    }
}

#[test]
fn a_projection_can_be_replaced() {
    let mut model = Gpt2Like::new(&small_like(), F64).unwrap();
    let tokens = Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]);
    let before = model.logits(&Input::new(&tokens)).unwrap();
    map_modules(&mut model, &mut Double("output_linear")).unwrap();
    let after = model.logits(&Input::new(&tokens)).unwrap();
    assert!((after - before * 2.0).abs().max().double_value(&[]) < 1e-12);
    assert!(module::parameters(&model).iter().any(|(name, _)| name == "output_linear.base.weight"));
}

#[test]
fn both_models_are_causal() {
    let models: [Box<dyn LanguageModel>; 2] =
        [Box::new(Gpt2::new(&small(), F64).unwrap()), Box::new(Gpt2Like::new(&small_like(), F64).unwrap())];
    for model in models {
        let tokens = Tensor::from_slice(&[5i64, 6, 7, 8]).view([1, 4]);
        let changed = Tensor::from_slice(&[5i64, 6, 9, 1]).view([1, 4]);
        let (a, b) =
            (model.logits(&Input::new(&tokens)).unwrap(), model.logits(&Input::new(&changed)).unwrap());
        assert_eq!(a.narrow(1, 0, 2), b.narrow(1, 0, 2));
        assert_ne!(a.narrow(1, 2, 2), b.narrow(1, 2, 2));
    }
}

#[test]
fn invalid_arguments_are_errors() {
    let words = |result: models::Result<Gpt2Like>| result.unwrap_err().to_string();
    let config = |change: fn(&mut Gpt2LikeConfig)| {
        let mut config = small_like();
        change(&mut config);
        words(Gpt2Like::new(&config, F32))
    };
    assert_eq!(
        config(|config| config.hidden_dim = 1023),
        "attention: 2 heads do not divide the width 1023; take a multiple of 2"
    );
    assert_eq!(
        config(|config| config.vocab_size = 0),
        "GPT-2-like model: `vocab_size` is 0; expected at least 1"
    );
    assert_eq!(
        config(|config| config.dropout = 1.5),
        "decoder layer: `dropout` is 1.5; expected a probability in [0, 1)"
    );

    let model = Gpt2Like::new(&small_like(), F32).unwrap();
    let run = |tokens: &Tensor| model.logits(&Input::new(tokens)).unwrap_err().to_string();
    assert_eq!(
        run(&Tensor::from_slice(&[1i64, 40]).view([1, 2])),
        "token 40 is outside the model's vocabulary of 40 (0 to 39); the tokenizer and the model do not belong together, or \
         the model needs a larger `vocabulary`"
    );
    assert_eq!(
        run(&Tensor::zeros([1, 13], (Kind::Int64, Device::Cpu))),
        "positions: `x` has shape [1, 13, 6]; expected at most 12 positions; shorten the rows, or create the model with a larger maximum"
    );
    assert_eq!(
        run(&Tensor::zeros([3], (Kind::Int64, Device::Cpu))),
        "embedding: `tokens` has shape [3]; expected [batch, sequence]"
    );
    assert_eq!(
        run(&Tensor::zeros([1, 3], F32)),
        "embedding: `tokens` is Float on Cpu; expected Int64 on Cpu, the device of the weights"
    );
}

#[test]
fn parameter_counts_match_the_published_ones() {
    // The published GPT-2 of "124M": computed without allocating tensors.
    let Gpt2Config { vocabulary, max_sequence, hidden, layers, .. } = Gpt2Config::small();
    let on_paper = |v: i64, t: i64, d: i64, l: i64| v * d + t * d + l * (12 * d * d + 13 * d) + 2 * d;
    assert_eq!(on_paper(vocabulary, max_sequence, hidden, layers), 124_439_808);
    let Gpt2Config { vocabulary, max_sequence, hidden, layers, .. } = small();
    let model = Gpt2::new(&small(), F32).unwrap();
    assert_eq!(
        module::parameter_count(&model).total as i64,
        on_paper(vocabulary, max_sequence, hidden, layers)
    );
}
