//! Activation plans under autocast: recomputation uses the dtypes of the forward pass.

use amp::Autocast;
use models::module::{Context, Input, LanguageModel, parameters};
use models::{Gpt2, Gpt2Config};
use runtime::autograd::{backward, set_grad};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};
use training::activations::{Activations, LayerPlan};

#[test]
fn every_plan_gives_the_gradients_of_keeping_everything() {
    let config = Gpt2Config {
        vocabulary: 40,
        max_sequence: 12,
        hidden: 16,
        heads: 2,
        layers: 3,
        ..Gpt2Config::small()
    };
    let mut model = Gpt2::new(&config, (Kind::Float, Device::Cpu)).unwrap();
    let activations = Activations::install(&mut model, &[LayerPlan::KeepAll; 3]).unwrap();
    let tokens = Generator::new(3).unwrap().uniform(&[2, 12], (0.0, 40.0), (Kind::Float, Device::Cpu));
    let tokens = tokens.unwrap().to_kind(Kind::Int64);
    let gradients = |autocast: &Autocast, plan: LayerPlan| -> Vec<Tensor> {
        activations.change(&[plan; 3]).unwrap();
        for (_, tensor) in parameters(&model) {
            set_grad(tensor, None).unwrap();
        }
        let loss = {
            let _scope = autocast.enter();
            let context = Context { training: true, ..Context::default() };
            model.loss(&Input { tokens: &tokens, positions: None, context }, &tokens).unwrap().sum
        };
        backward(&[&loss]).unwrap();
        parameters(&model).iter().map(|(_, tensor)| tensor.grad()).collect()
    };
    let policies = [
        ("bf16", Autocast::new(Kind::BFloat16).unwrap()),
        ("fp16", Autocast::new(Kind::Half).unwrap()),
        ("fp8", Autocast::fp8()),
    ];
    for (name, autocast) in policies {
        let expected = gradients(&autocast, LayerPlan::KeepAll);
        for plan in LayerPlan::ALL {
            assert_eq!(gradients(&autocast, plan), expected, "{name}, {plan}");
        }
    }
}
