//! The head in a model.

use expect_test::expect;
use fused_ce::{Chunk, LinearCrossEntropy};
use models::module::{
    Context, Input, LanguageModel, LossHead, LossOutput, Module, Visitor, VisitorMut, parameters,
};
use models::state_dict::{load_state_dict, state_dict};
use models::{Gpt2, Gpt2Config, Gpt2Like, Gpt2LikeConfig};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const VOCABULARY: i64 = 101;

fn gpt2() -> Box<dyn LanguageModel> {
    let config = Gpt2Config {
        vocabulary: VOCABULARY,
        max_sequence: 16,
        hidden: 24,
        heads: 2,
        layers: 2,
        ..Gpt2Config::small()
    };
    Box::new(Gpt2::new(&config, F32).unwrap())
}

fn gpt2_like() -> Box<dyn LanguageModel> {
    let config = Gpt2LikeConfig {
        vocab_size: VOCABULARY,
        embedding_dim: 16,
        hidden_dim: 24,
        num_heads: 2,
        ff_dim: 32,
        max_length: 16,
        dropout: 0.0,
        ..Gpt2LikeConfig::default()
    };
    Box::new(Gpt2Like::new(&config, F32).unwrap())
}

/// Returns two models with equal random weights, the second with this crate's head.
fn pair(make: fn() -> Box<dyn LanguageModel>, seed: u64) -> [Box<dyn LanguageModel>; 2] {
    let (plain, mut ours) = (make(), make());
    let mut generator = Generator::new(seed).unwrap();
    let drawn: Vec<_> = state_dict(&*plain)
        .into_iter()
        .map(|(name, tensor)| {
            let values = generator.normal(&tensor.size(), F32).unwrap() * 0.2;
            // Norm weights near 1 keep activations in a range where fp32 has equal precision.
            let shift = if name.ends_with("weight") && tensor.dim() == 1 { 1.0 } else { 0.0 };
            (name, values + shift)
        })
        .collect();
    load_state_dict(&*plain, &drawn, "drawn").unwrap();
    let options = LinearCrossEntropy { chunk: Some(Chunk::Tokens(7)), ..LinearCrossEntropy::default() };
    options.install(&mut *ours).unwrap();
    // Each loads the state of the other.
    load_state_dict(&*ours, &state_dict(&*plain), "the plain model").unwrap();
    load_state_dict(&*plain, &state_dict(&*ours), "the model with the other head").unwrap();
    [plain, ours]
}

fn batch(seed: u64) -> (Tensor, Tensor) {
    let mut generator = Generator::new(seed).unwrap();
    let mut drawn = || {
        let uniform =
            generator.uniform(&[3, 9], (0.0, VOCABULARY as f64), (Kind::Double, Device::Cpu)).unwrap();
        uniform.to_kind(Kind::Int64)
    };
    let (tokens, labels) = (drawn(), drawn());
    let _ = labels.narrow(1, 0, 2).fill_(-100);
    (tokens, labels)
}

fn loss(model: &dyn LanguageModel, tokens: &Tensor, labels: &Tensor) -> LossOutput {
    let context = Context { accuracy: true, training: true, ..Context::default() };
    model.loss(&Input { context, ..Input::new(tokens) }, labels).unwrap()
}

fn close(name: &str, found: &Tensor, expected: &Tensor, share: f64) {
    assert_eq!((found.size(), found.kind()), (expected.size(), expected.kind()), "{name}");
    let error = (found - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    assert!(error <= share * scale, "{name}: {error:e} of {scale:e}");
}

#[test]
fn a_model_has_the_same_loss_and_gradients_with_either_head() {
    for (make, tied) in [(gpt2 as fn() -> Box<dyn LanguageModel>, true), (gpt2_like, false)] {
        let [plain, ours] = pair(make, 1);
        let names = |model: &dyn LanguageModel| -> Vec<String> {
            state_dict(model).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(&*plain), names(&*ours));
        let (tokens, labels) = batch(2);
        let input = Input::new(&tokens);
        close("logits", &ours.logits(&input).unwrap(), &plain.logits(&input).unwrap(), 1e-5);
        // Every other label is the prediction, so that some are correct.
        let best = plain.logits(&input).unwrap().argmax(-1, false);
        let even = Tensor::arange(9, (Kind::Int64, Device::Cpu)).remainder(2).eq(0);
        let labels = best.where_self(&even.logical_and(&labels.ge(0)), &labels);
        let [expected, found] = [&plain, &ours].map(|model| {
            let output = loss(&**model, &tokens, &labels);
            runtime::autograd::backward(&[&(&output.sum / 21.0)]).unwrap();
            output
        });
        close("loss", &found.sum.detach(), &expected.sum.detach(), 1e-6);
        let correct = |output: &LossOutput| output.correct.as_ref().unwrap().int64_value(&[]);
        assert_eq!(correct(&found), correct(&expected));
        assert!(correct(&found) >= 3 * 3 && correct(&found) < 21, "{}", correct(&found));
        for ((name, expected), (_, found)) in parameters(&*plain).into_iter().zip(parameters(&*ours)) {
            close(&name, &found.grad(), &expected.grad(), 2e-5);
        }
        // With a tied embedding, a token that is neither an input nor a label still gets the gradient of the softmax.
        let embedding =
            parameters(&*ours).into_iter().find(|(_, tensor)| tensor.size()[0] == VOCABULARY).unwrap().1;
        let read = Vec::<i64>::try_from(tokens.reshape([-1])).unwrap();
        let unread = (0..VOCABULARY).find(|token| !read.contains(token)).unwrap();
        let of_unread = embedding.grad().get(unread).abs().max().double_value(&[]);
        assert_eq!(of_unread > 0.0, tied, "{of_unread}");
    }
}

#[test]
fn ten_steps_of_descent_end_at_the_same_weights() {
    for make in [gpt2 as fn() -> Box<dyn LanguageModel>, gpt2_like] {
        let models = pair(make, 3);
        let mut losses = [Vec::new(), Vec::new()];
        for step in 0..10 {
            // Two alternating batches, so that ten steps learn something.
            let (tokens, labels) = batch(4 + step % 2);
            for (model, losses) in models.iter().zip(&mut losses) {
                let mean = loss(&**model, &tokens, &labels).sum / 21.0;
                losses.push(mean.double_value(&[]));
                runtime::autograd::backward(&[&mean]).unwrap();
                let _no_grad = tch::no_grad_guard();
                for (_, parameter) in parameters(&**model) {
                    let _ = parameter.shallow_clone().f_sub_(&(parameter.grad() * 0.05)).unwrap();
                    runtime::autograd::set_grad(parameter, None).unwrap();
                }
            }
        }
        for (expected, found) in losses[0].iter().zip(&losses[1]) {
            assert!((expected - found).abs() <= 1e-4 * expected, "{losses:?}");
        }
        assert!(losses[1][9] < losses[1][1], "nothing was learned: {losses:?}");
        for ((name, expected), (_, found)) in state_dict(&*models[0]).into_iter().zip(state_dict(&*models[1]))
        {
            close(&name, &found, &expected, 1e-3);
        }
    }
}

/// A head that is not a projection.
#[derive(Debug)]
struct Strange {
    centres: Tensor,
}

impl Module for Strange {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        visitor.parameter("centres", &self.centres);
    }
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        visitor.parameter("centres", &mut self.centres)
    }
}

impl LossHead for Strange {
    fn logits(&self, hidden_btd: &Tensor, _: &Context<'_>) -> models::Result<Tensor> {
        Ok(hidden_btd.f_matmul(&self.centres.f_tr()?)?)
    }
    fn loss(&self, hidden_btd: &Tensor, _: &Tensor, _: &Context<'_>) -> models::Result<LossOutput> {
        Ok(LossOutput { sum: hidden_btd.f_sum(Kind::Float)?, correct: None })
    }
}

#[derive(Debug)]
struct Model {
    head: Option<Box<dyn LossHead>>,
}

impl Module for Model {
    fn visit<'a>(&'a self, visitor: &mut Visitor<'a, '_>) {
        if let Some(head) = &self.head {
            visitor.part("lm_head", &**head);
        }
    }
    fn visit_mut(&mut self, visitor: &mut VisitorMut<'_>) -> models::Result<()> {
        self.head.as_mut().map_or(Ok(()), |head| visitor.loss_head("lm_head", head))
    }
}

#[test]
fn a_head_that_is_not_a_projection_is_refused_and_kept() {
    let options = LinearCrossEntropy::default();
    let centres = Tensor::zeros([5, 4], F32);
    let mut model = Model { head: Some(Box::new(Strange { centres })) };
    expect![[r#"linear cross-entropy cannot replace the head `lm_head` with the tensors ["centres"]; expected `weight` [vocabulary, hidden], with or without `bias`"#]].assert_eq(&options.install(&mut model).unwrap_err().to_string());
    assert!(format!("{:?}", model.head).contains("Strange"));
    let mut model = Model { head: None };
    expect!["linear cross-entropy: the model has no loss head to replace; pass a language model"]
        .assert_eq(&options.install(&mut model).unwrap_err().to_string());
    let mut model = gpt2();
    let bad = LinearCrossEntropy { label_smoothing: 2.0, ..options.clone() };
    expect!["linear cross-entropy: label_smoothing is 2; expected a number in [0, 1]"]
        .assert_eq(&bad.install(&mut *model).unwrap_err().to_string());
    // Installing twice is the same as once.
    options.install(&mut *model).unwrap();
    options.install(&mut *model).unwrap();
}
