//! PyTorch's results for the GPT-2-like model: 20 steps of Adam from given weights over given batches.

use std::collections::BTreeMap;
use std::path::PathBuf;

use models::module::{self, Context, IGNORE_INDEX, Input, LanguageModel};
use models::state_dict::load_state_dict;
use models::{AttentionPath, Gpt2Like, Gpt2LikeConfig, tensors_file};
use runtime::ops::optimizer::{AdamW, AdamWTensors, fused_adamw_};
use tch::{Device, Kind, Tensor};

fn folder() -> PathBuf {
    std::env::var_os("FRUGAL_FIXTURES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/fixtures")),
        PathBuf::from,
    )
}

struct Case {
    config: Gpt2LikeConfig,
    adam: AdamW,
    tensors: BTreeMap<String, Tensor>,
}

fn case() -> Case {
    let folder = folder().join("gpt2_like");
    let json = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let options: serde_json::Value = serde_json::from_str(&json).unwrap();
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    Case {
        config: serde_json::from_str(&json).unwrap(),
        adam: AdamW {
            lr: number(&options["lr"]),
            beta1: number(&options["betas"][0]),
            beta2: number(&options["betas"][1]),
            eps: number(&options["eps"]),
            weight_decay: 0.0,
            maximize: false,
        },
        tensors: tensors_file::read(&folder.join("cases.safetensors"), Device::Cpu)
            .unwrap()
            .into_iter()
            .collect(),
    }
}

fn model(case: &Case, path: AttentionPath) -> Gpt2Like {
    let config = Gpt2LikeConfig { attention: path, ..case.config.clone() };
    let model = Gpt2Like::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let weights: Vec<(String, Tensor)> = case
        .tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("param.")?.to_owned(), tensor.shallow_clone())))
        .collect();
    load_state_dict(&model, &weights, "the fixture").unwrap();
    model
}

/// The next token of each, if it is within the row's length.
fn labels(tokens: &Tensor, lengths: &Tensor) -> Tensor {
    let next = tokens.narrow(1, 1, tokens.size()[1] - 1);
    let positions = Tensor::arange_start(1, tokens.size()[1], (Kind::Int64, Device::Cpu));
    next.where_scalarother(&positions.unsqueeze(0).lt_tensor(&lengths.unsqueeze(1)), IGNORE_INDEX)
}

#[test]
fn fixtures_gpt2_like_losses_and_accuracies() {
    let case = case();
    for path in [AttentionPath::Fused, AttentionPath::DenseMask, AttentionPath::Explicit] {
        let model = model(&case, path);
        let params: Vec<&Tensor> = module::trainable(&model).into_iter().map(|(_, tensor)| tensor).collect();
        let zeros = || params.iter().map(|tensor| tensor.zeros_like().detach()).collect::<Vec<_>>();
        let (m, v) = (zeros(), zeros());
        let steps: Vec<Tensor> = params.iter().map(|_| Tensor::from(0f32)).collect();
        let (tokens, lengths) = (&case.tensors["tokens"], &case.tensors["lengths"]);
        let (losses, accuracies) = (&case.tensors["losses"], &case.tensors["accuracies"]);
        let mut worst = 0f64;
        for step in 0..tokens.size()[0] {
            let tokens = tokens.get(step);
            let labels = labels(&tokens, &lengths.get(step));
            let count = labels.ne(IGNORE_INDEX).sum(Kind::Int64).int64_value(&[]);
            let context = Context { training: true, accuracy: true, ..Default::default() };
            let read = tokens.narrow(1, 0, tokens.size()[1] - 1);
            let output = model.loss(&Input { context, ..Input::new(&read) }, &labels).unwrap();
            let loss = &output.sum / count;
            params.iter().for_each(|tensor| runtime::autograd::set_grad(tensor, None).unwrap());
            runtime::autograd::backward(&[&loss]).unwrap();
            let grads: Vec<Tensor> = params.iter().map(|tensor| tensor.grad()).collect();
            let lists = |tensors: &[Tensor]| tensors.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
            let tensors = AdamWTensors {
                params: &params.iter().map(|tensor| tensor.shallow_clone()).collect::<Vec<_>>(),
                grads: &grads,
                exp_avgs: &lists(&m),
                exp_avg_sqs: &lists(&v),
                steps: &lists(&steps),
            };
            fused_adamw_(&tensors, case.adam, None).unwrap();

            let expected = losses.double_value(&[step]);
            worst = worst.max((loss.double_value(&[]) / expected - 1.0).abs());
            let right = output.correct.unwrap().int64_value(&[]) as f64 / count as f64;
            assert!(
                (right - accuracies.double_value(&[step])).abs() < 0.5 / count as f64,
                "step {step}: accuracy {right}"
            );
        }
        eprintln!(
            "{path:?}: worst relative error of a loss {worst:.1e}, {:.0} % of the tolerance",
            worst / 1e-5 * 100.0
        );
        assert!(worst <= 1e-5, "{path:?}: {worst}");
    }
}
