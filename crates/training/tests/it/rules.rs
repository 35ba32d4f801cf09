//! Rules whose state is not one tensor of the parameter's shape and dtype: its layout, saving and loading, parts, refusals; Muon's groups.

use expect_test::expect;
use models::module::trainable;
use models::{DecoderConfig, Llama};
use tch::{Device, Kind, Tensor};
use training::optimizer::{
    Adafactor, AdamW, AdamW8bit, DeviceOptimizer, Extent, Group, Implementation, Lion, Muon, Rule,
};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn rules() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(Lion::default()),
        Box::<AdamW8bit>::default(),
        Box::new(Adafactor::default()),
        Box::<Muon>::default(),
    ]
}

fn start(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, CPU) * 0.3 + 1.0).cos().reshape(shape)
}

fn gradient(step: i64, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, CPU) * 0.7 + step as f64).sin().reshape(shape)
}

fn leaf(shape: &[i64], kind: Kind) -> Tensor {
    start(shape).to_kind(kind).set_requires_grad(true)
}

fn optimizer(rule: Box<dyn Rule>, parameters: &[(&str, &Tensor)]) -> DeviceOptimizer {
    let parameters = parameters.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.shallow_clone()));
    let group = Group { weight_decay: 0.1, ..Group::new(parameters.collect::<Vec<_>>(), 0.01) };
    DeviceOptimizer::boxed(rule, vec![group]).unwrap()
}

fn step(optimizer: &mut DeviceOptimizer, parameters: &[(&str, &Tensor)], number: i64) {
    for (_, tensor) in parameters {
        let gradient = gradient(number, &tensor.size()).to_kind(tensor.kind());
        runtime::autograd::set_grad(tensor, Some(&gradient)).unwrap();
    }
    optimizer.step().unwrap();
}

#[test]
fn the_state_of_each_rule_has_the_layout_that_it_describes() {
    let mut lines = Vec::new();
    for (number, rule) in rules().into_iter().enumerate() {
        // Muon is for matrices only.
        let shapes: &[&[i64]] =
            if rule.name() == "muon" { &[&[64, 70]] } else { &[&[64, 70], &[4095], &[2, 64, 70]] };
        for shape in shapes {
            let slots = rule.slots(Extent::of(shape));
            let described: u64 = slots.iter().map(|slot| slot.bytes(Kind::Float)).sum();
            let name = rule.name();
            let w = leaf(shape, Kind::Float);
            let mut made = optimizer(rules().swap_remove(number), &[("w", &w)]);
            step(&mut made, &[("w", &w)], 1);
            assert_eq!(made.state_bytes(), described, "{name} {shape:?}");
            let state = made.state();
            let state = state
                .iter()
                .skip(1)
                .map(|(name, tensor)| format!("{name} {:?} {:?}", tensor.kind(), tensor.size()));
            lines.push(format!("{name} {shape:?}: {}", state.collect::<Vec<_>>().join(", ")));
        }
    }
    expect![[r#"
        lion [64, 70]: w.exp_avg Float [64, 70]
        lion [4095]: w.exp_avg Float [4095]
        lion [2, 64, 70]: w.exp_avg Float [2, 64, 70]
        adam_w_8bit [64, 70]: w.exp_avg Uint8 [64, 70], w.exp_avg_scale Float [18], w.exp_avg_sq Uint8 [64, 70], w.exp_avg_sq_scale Float [18]
        adam_w_8bit [4095]: w.exp_avg Float [4095], w.exp_avg_sq Float [4095]
        adam_w_8bit [2, 64, 70]: w.exp_avg Uint8 [2, 64, 70], w.exp_avg_scale Float [35], w.exp_avg_sq Uint8 [2, 64, 70], w.exp_avg_sq_scale Float [35]
        adafactor [64, 70]: w.exp_avg_sq_row Float [64], w.exp_avg_sq_col Float [70]
        adafactor [4095]: w.exp_avg_sq Float [4095]
        adafactor [2, 64, 70]: w.exp_avg_sq_row Float [2, 64], w.exp_avg_sq_col Float [2, 70]
        muon [64, 70]: w.momentum_buffer Float [64, 70]"#]]
    .assert_eq(&lines.join("\n"));
}

/// A stopped run whose state is loaded into another continues bit for bit, in every implementation and dtype.
#[test]
fn states_of_every_layout_round_trip() {
    for implementation in [Implementation::ForLoop, Implementation::Foreach, Implementation::Fused] {
        for kind in [Kind::Float, Kind::BFloat16] {
            for number in 0..rules().len() {
                let rule = || rules().swap_remove(number);
                let shapes: [&[i64]; 3] = [&[64, 70], &[9, 5], &[16, 3]];
                let make = || {
                    let parameters = shapes.map(|shape| leaf(shape, kind));
                    let [a, b, c] = &parameters;
                    let made = optimizer(rule(), &[("a", a), ("b", b), ("c", c)]);
                    let made = made.with_implementation(implementation).with_stochastic_rounding(3);
                    (parameters, made)
                };
                let run = |parameters: &[Tensor; 3],
                           optimizer: &mut DeviceOptimizer,
                           steps: std::ops::Range<i64>| {
                    let [a, b, c] = parameters;
                    steps.for_each(|number| step(optimizer, &[("a", a), ("b", b), ("c", c)], number));
                };
                let (ours, mut whole) = make();
                run(&ours, &mut whole, 0..2);
                let (theirs, mut resumed) = make();
                tch::no_grad(|| {
                    for (to, from) in theirs.iter().zip(&ours) {
                        to.shallow_clone().copy_(&from.detach());
                    }
                });
                resumed.load_state(&whole.state()).unwrap();
                run(&ours, &mut whole, 2..4);
                run(&theirs, &mut resumed, 2..4);
                let what = format!("{} {implementation:?} {kind:?}", rule().name());
                assert!(ours.iter().zip(&theirs).all(|(ours, theirs)| ours.equal(theirs)), "{what}");
                assert_eq!(whole.state(), resumed.state(), "{what}");
            }
        }
    }
}

/// Parts as ranks have them, also those below 4096 elements.
#[test]
fn parts_of_blocks_have_the_bits_of_the_whole() {
    let whole = leaf(&[5000], Kind::Float);
    let mut all = optimizer(Box::<AdamW8bit>::default(), &[("w", &whole)]);
    let ends = [0, 256, 4096, 5000];
    let parts: Vec<Tensor> = ends
        .windows(2)
        .map(|ends| start(&[5000]).narrow(0, ends[0], ends[1] - ends[0]).copy().set_requires_grad(true))
        .collect();
    let mut optimizers: Vec<DeviceOptimizer> = parts
        .iter()
        .map(|part| optimizer(Box::<AdamW8bit>::default(), &[("w", part)]).with_parts(|_| 5000))
        .collect();
    for number in 0..3 {
        step(&mut all, &[("w", &whole)], number);
        for ((part, optimizer), ends) in parts.iter().zip(&mut optimizers).zip(ends.windows(2)) {
            let gradient = gradient(number, &[5000]).narrow(0, ends[0], ends[1] - ends[0]);
            runtime::autograd::set_grad(part, Some(&gradient)).unwrap();
            optimizer.step().unwrap();
        }
    }
    assert!(Tensor::cat(&parts, 0).equal(&whole));
    for (name, tensor) in all.state().iter().skip(1) {
        let of = |optimizer: &DeviceOptimizer| {
            let found = optimizer.state().into_iter().find(|(other, _)| other == name);
            found.unwrap_or_else(|| panic!("{name}")).1
        };
        assert!(Tensor::cat(&optimizers.iter().map(of).collect::<Vec<_>>(), 0).equal(tensor), "{name}");
    }
}

#[test]
fn muon_has_the_matrices_between_embedding_and_head() {
    let model = Llama::new(&DecoderConfig::qwen2(61, 8, 12, 2, 1), CPU).unwrap();
    let groups = Muon::groups(trainable(&model), 0.01, 0.1, AdamW::default());
    let lines: Vec<String> = groups
        .iter()
        .map(|group| {
            let rule = group.rule.as_ref().map_or("the optimizer's", |rule| rule.name());
            let of_first = |(name, _): &&(String, Tensor)| !name.starts_with("layers.1.");
            let names: Vec<&str> =
                group.parameters.iter().filter(of_first).map(|(name, _)| name.as_str()).collect();
            format!("{} {} {rule}: {}", group.name, group.weight_decay, names.join(" "))
        })
        .collect();
    expect![[r#"
        matrices 0.1 the optimizer's: layers.0.self_attn.q_proj.weight layers.0.self_attn.k_proj.weight layers.0.self_attn.v_proj.weight layers.0.self_attn.o_proj.weight layers.0.mlp.gate_proj.weight layers.0.mlp.up_proj.weight layers.0.mlp.down_proj.weight
        decay 0.1 adam_w: embed_tokens.weight
        no_decay 0 adam_w: layers.0.self_attn.q_proj.bias layers.0.self_attn.k_proj.bias layers.0.self_attn.v_proj.bias layers.0.input_layernorm.weight layers.0.post_attention_layernorm.weight norm.weight"#]].assert_eq(&lines.join("\n"));
    // Both rules step, each with its own state.
    let mut made = DeviceOptimizer::new(Muon::default(), groups).unwrap();
    for (_, tensor) in trainable(&model) {
        runtime::autograd::set_grad(tensor, Some(&gradient(1, &tensor.size()))).unwrap();
    }
    made.step().unwrap();
    let state = made.state();
    let has = |name: &str| state.iter().any(|(other, _)| other == name);
    assert!(has("layers.0.mlp.up_proj.weight.momentum_buffer") && has("embed_tokens.weight.exp_avg_sq"));
    assert!(!has("layers.0.mlp.up_proj.weight.exp_avg_sq") && !has("embed_tokens.weight.momentum_buffer"));
}

/// The nearest orthogonal matrix by a singular value decomposition: an update's singular values are near 1, and those of the other are its own
/// directions.
#[test]
fn an_update_of_muon_is_nearly_orthogonal() {
    for shape in [[40i64, 12], [12, 40]] {
        let w = Tensor::zeros(shape, CPU).set_requires_grad(true);
        let group = Group::new(vec![("w".into(), w.shallow_clone())], 1.0);
        let rule = Muon { scale: training::optimizer::MuonScale::Original, ..Muon::default() };
        let mut made = DeviceOptimizer::new(rule, vec![group]).unwrap();
        tch::manual_seed(1);
        let gradient = Tensor::randn(shape, CPU);
        runtime::autograd::set_grad(&w, Some(&gradient)).unwrap();
        made.step().unwrap();
        let scale = (shape[0] as f64 / shape[1] as f64).max(1.0).sqrt();
        let update = w.detach() / -scale;
        let (_, values, _) = update.svd(true, true);
        let (least, most) = (values.min().double_value(&[]), values.max().double_value(&[]));
        assert!(least > 0.6 && most < 1.25, "{shape:?}: {least} to {most}");
        let (u, _, v) = gradient.svd(true, true);
        let exact = u.matmul(&v.transpose(0, 1));
        let cosine =
            ((&update * &exact).sum(Kind::Double) / (update.norm() * exact.norm())).double_value(&[]);
        assert!(cosine > 0.97, "{shape:?}: {cosine}");
    }
}

#[test]
fn what_a_rule_cannot_update_is_refused() {
    let of = |rule: Box<dyn Rule>, shape: &[i64], kind: Kind| {
        let group = Group::new(vec![("w".into(), leaf(shape, kind))], 0.1);
        DeviceOptimizer::boxed(rule, vec![group]).unwrap_err().to_string()
    };
    let mut lines = vec![
        of(Box::<Muon>::default(), &[4], Kind::Float),
        of(Box::<Muon>::default(), &[2, 3, 4], Kind::Float),
        of(Box::new(Muon { steps: 0, ..Muon::default() }), &[4, 4], Kind::Float),
        of(Box::new(Muon { products: Some(Kind::Half), ..Muon::default() }), &[4, 4], Kind::Float),
        of(Box::<AdamW8bit>::default(), &[4], Kind::Double),
        of(Box::new(AdamW8bit { beta2: 1.0, ..AdamW8bit::default() }), &[4], Kind::Float),
        of(Box::new(Lion { beta1: -0.1, ..Lion::default() }), &[4], Kind::Float),
        of(Box::new(Adafactor { clip_threshold: 0.0, ..Adafactor::default() }), &[4], Kind::Float),
        of(Box::new(Adafactor { decay_rate: 0.5, ..Adafactor::default() }), &[4], Kind::Float),
    ];
    // The state of AdamW is not that of 8 bits.
    let w = leaf(&[64, 64], Kind::Float);
    let mut adam = optimizer(Box::new(AdamW::default()), &[("w", &w)]);
    step(&mut adam, &[("w", &w)], 1);
    let mut made = optimizer(Box::<AdamW8bit>::default(), &[("w", &w)]);
    lines.push(made.load_state(&adam.state()).unwrap_err().to_string());
    expect![[r#"
        muon: `w` has the shape [4], and Muon is for matrices; put it in a group whose rule is AdamW, as `Muon::groups` does
        muon: `w` has the shape [2, 3, 4], and Muon is for matrices; put it in a group whose rule is AdamW, as `Muon::groups` does
        muon: steps is 0; expected 1 to 99
        muon: products is Half; expected bf16, fp32 or fp64, as fp16 overflows
        adam_w_8bit: `w` is Double, and the moments are computed in fp32; use AdamW, or a parameter of 16 or 32 bits
        adam_w_8bit: beta2 is 1; expected a number in [0, 1)
        lion: beta1 is -0.1; expected a number in [0, 1)
        adafactor: clip_threshold is 0; expected a number above 0
        adafactor: decay_rate is 0.5; expected a number below 0
        the optimizer's state does not fit the parameters: missing w.exp_avg_scale, w.exp_avg_sq_scale; different w.exp_avg (Float [64, 64], expected Uint8 [64, 64]), w.exp_avg_sq (Float [64, 64], expected Uint8 [64, 64])"#]].assert_eq(&lines.join("\n"));
}

/// The version counter lets a graph that saved a parameter, and a cache of casts, detect the change.
#[test]
fn every_step_counts_as_an_in_place_change() {
    for rule in rules() {
        let w = leaf(&[64, 64], Kind::Float);
        let mut made = optimizer(rule, &[("w", &w)]);
        let before = w.internal_version();
        step(&mut made, &[("w", &w)], 1);
        assert!(w.internal_version() > before, "{}", made.rule().name());
    }
}
