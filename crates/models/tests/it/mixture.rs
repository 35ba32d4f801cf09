//! The mixture of experts against all experts computed for all tokens, in f64: values and gradients.

use decoder::{ClampedSwiglu, Mixture};
use models::module::{Context, Mlp, freeze, tensors};
use models::{Init, SparseMlp};
use runtime::autograd::{Keep, grad};
use tch::{Kind, Tensor, kind};

const EXPERTS: i64 = 5;
const PER_TOKEN: i64 = 2;

fn mixture(normalizes: bool) -> SparseMlp {
    created(normalizes, None)
}

fn created(normalizes: bool, clamped: Option<ClampedSwiglu>) -> SparseMlp {
    let mixture = Mixture {
        experts: EXPERTS,
        per_token: PER_TOKEN,
        intermediate_size: 7,
        // In Qwen3.5.
        shared: (normalizes && clamped.is_none()).then_some(9),
        normalizes,
        step: 1,
        dense_layers: Vec::new(),
        clamped,
    };
    SparseMlp::new(6, &mixture, Init::Normal { std: 0.8 }, kind::DOUBLE_CPU).unwrap()
}

fn named(mlp: &SparseMlp) -> Vec<(String, Tensor)> {
    tensors(mlp).into_iter().map(|named| (named.name, named.tensor.shallow_clone())).collect()
}

/// Σ_e w_e·expert_e(x) over all experts, with w = 0 for those that are not chosen, and with a shared expert where weights are normalised.
fn dense(x: &Tensor, tensors: &[(String, Tensor)], normalizes: bool) -> Tensor {
    let weight = |name: String| &tensors.iter().find(|(other, _)| *other == name).unwrap().1;
    let probabilities = x.matmul(&weight("gate.weight".to_owned()).tr()).softmax(-1, Kind::Double);
    let (_, chosen) = probabilities.topk(PER_TOKEN, -1, true, true);
    let is_chosen = probabilities.detach().zeros_like().scatter_value(-1, &chosen, 1.0);
    let mut weights = probabilities * is_chosen;
    if normalizes {
        weights = &weights / weights.sum_dim_intlist([-1].as_slice(), true, Kind::Double);
    }
    let mut sum = x.zeros_like();
    for expert in 0..EXPERTS {
        let of = |name: &str| weight(format!("experts.{expert}.{name}.weight")).tr();
        let inner = x.matmul(&of("gate_proj")).silu() * x.matmul(&of("up_proj"));
        sum += weights.narrow(1, expert, 1) * inner.matmul(&of("down_proj"));
    }
    if !normalizes {
        return sum;
    }
    let of = |name: &str| weight(format!("{name}.weight")).tr();
    let inner = x.matmul(&of("shared_expert.gate_proj")).silu() * x.matmul(&of("shared_expert.up_proj"));
    sum + x.matmul(&of("shared_expert_gate")).sigmoid() * inner.matmul(&of("shared_expert.down_proj"))
}

fn difference(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[])
}

#[test]
fn values_and_gradients_are_those_of_all_experts() {
    tch::manual_seed(5);
    for normalizes in [false, true] {
        let mlp = mixture(normalizes);
        let tensors = named(&mlp);
        let x = Tensor::randn([3, 4, 6], kind::DOUBLE_CPU).set_requires_grad(true);
        let slopes = Tensor::randn([3, 4, 6], kind::DOUBLE_CPU);
        let rows = x.view([12, 6]);
        let expected = dense(&rows, &tensors, normalizes).view([3, 4, 6]);
        let found = mlp.forward(&x, &Context::default()).unwrap();
        assert!(difference(&found, &expected) < 1e-12, "normalizes: {normalizes}");

        // With every tensor trained, and with x alone: the gradient of x passes through the router nevertheless.
        let inputs: Vec<&Tensor> = [&x].into_iter().chain(tensors.iter().map(|(_, tensor)| tensor)).collect();
        let of = |y: &Tensor, inputs: &[&Tensor]| {
            let loss = (y * &slopes).sum(Kind::Double);
            grad(&[&loss], &[None], inputs, Keep::default()).unwrap()
        };
        let (expected, found) = (of(&expected, &inputs), of(&found, &inputs));
        let mut of_x = None;
        for (index, (expected, found)) in expected.into_iter().zip(found).enumerate() {
            let name = if index == 0 { "x" } else { tensors[index - 1].0.as_str() };
            let (expected, found) =
                (expected.unwrap(), found.unwrap_or_else(|| panic!("{name}: no gradient")));
            assert!(difference(&found, &expected) < 1e-11, "{name}, normalizes: {normalizes}");
            of_x.get_or_insert(found);
        }
        freeze(&mlp, ".*", true).unwrap();
        let y = mlp.forward(&x, &Context::default()).unwrap();
        let frozen = of(&y, &[&x]).remove(0).unwrap();
        assert!(difference(&frozen, of_x.as_ref().unwrap()) < 1e-14, "frozen, normalizes: {normalizes}");
    }
}

/// gpt-oss's: biases everywhere, the softmax of the chosen logits, limits that some numbers exceed.
#[test]
fn clamped_experts_and_their_biases_have_the_gradients_of_the_formula() {
    tch::manual_seed(6);
    let clamped = ClampedSwiglu { alpha: 1.3, limit: 0.9 };
    let mlp = created(true, Some(clamped));
    let tensors = named(&mlp);
    for (name, tensor) in &tensors {
        if name.ends_with("bias") {
            let _no_grad = tch::no_grad_guard();
            tensor.shallow_clone().copy_(&Tensor::randn_like(tensor));
        }
    }
    let weight = |name: String| &tensors.iter().find(|(other, _)| *other == name).unwrap().1;
    let x = Tensor::randn([12, 6], kind::DOUBLE_CPU).set_requires_grad(true);
    let linear = |x: &Tensor, name: &str| {
        x.matmul(&weight(format!("{name}.weight")).tr()) + weight(format!("{name}.bias"))
    };
    let logits = linear(&x, "router");
    let (largest, chosen) = logits.topk(PER_TOKEN, -1, true, true);
    let weights = logits.zeros_like().scatter(-1, &chosen, &largest.softmax(-1, Kind::Double));
    let mut expected = x.zeros_like();
    for expert in 0..EXPERTS {
        let name = |projection: &str| format!("experts.{expert}.{projection}");
        let gate = linear(&x, &name("gate_proj")).clamp_max(clamped.limit);
        let up = linear(&x, &name("up_proj")).clamp(-clamped.limit, clamped.limit);
        let inner = (up + 1.0) * &gate * (&gate * clamped.alpha).sigmoid();
        expected += weights.narrow(1, expert, 1) * linear(&inner, &name("down_proj"));
    }
    let found = mlp.forward(&x, &Context::default()).unwrap();
    assert!(difference(&found, &expected) < 1e-12);
    let slopes = Tensor::randn([12, 6], kind::DOUBLE_CPU);
    let inputs: Vec<&Tensor> = [&x].into_iter().chain(tensors.iter().map(|(_, tensor)| tensor)).collect();
    let of = |y: &Tensor, inputs: &[&Tensor]| {
        grad(&[&(y * &slopes).sum(Kind::Double)], &[None], inputs, Keep::default()).unwrap()
    };
    let mut of_x = None;
    for (index, (expected, found)) in of(&expected, &inputs).into_iter().zip(of(&found, &inputs)).enumerate()
    {
        let name = if index == 0 { "x" } else { tensors[index - 1].0.as_str() };
        let (expected, found) = (expected.unwrap(), found.unwrap_or_else(|| panic!("{name}: no gradient")));
        assert!(difference(&found, &expected) < 1e-11, "{name}");
        of_x.get_or_insert(found);
    }
    freeze(&mlp, ".*", true).unwrap();
    let frozen = of(&mlp.forward(&x, &Context::default()).unwrap(), &[&x]).remove(0).unwrap();
    assert!(difference(&frozen, of_x.as_ref().unwrap()) < 1e-14);
}

#[test]
fn an_expert_without_tokens_has_no_gradient() {
    let mlp = mixture(true);
    let tensors = named(&mlp);
    let x = Tensor::randn([1, 6], kind::DOUBLE_CPU);
    let y = mlp.forward(&x, &Context::default()).unwrap();
    runtime::autograd::backward(&[&y.sum(Kind::Double)]).unwrap();
    let reached = tensors.iter().filter(|(name, tensor)| {
        name.starts_with("experts.") && name.contains("down_proj") && tensor.grad().defined()
    });
    assert_eq!(reached.count() as i64, PER_TOKEN);
}
