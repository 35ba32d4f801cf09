//! A teacher's divergences by chunks: TRL's values and gradients (`data/fixtures/distillation/make_divergences.py`), finite differences, and
//! the plain head.

use std::path::Path;

use fused_ce::models::distillation::{DistillationConfig, Divergence, OutputProjection, Teacher};
use fused_ce::models::module::LogitTransform;
use fused_ce::{
    Adapter, Chunk, Denominator, Gradients, Inputs, LinearCrossEntropy, Reduction, ReplacedRows, Targets,
};
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::random::Generator;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

#[derive(Deserialize)]
struct Fixture {
    labels: Vec<i64>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    beta: f64,
    temperature: f64,
    label_weight: f64,
    softcap: Option<f64>,
    hidden: Vec<Vec<f64>>,
    head: Vec<Vec<f64>>,
    teacher_hidden: Vec<Vec<f64>>,
    teacher_head: Vec<Vec<f64>>,
    tokens: Option<Vec<Vec<i64>>>,
    log_probabilities: Option<Vec<Vec<f64>>>,
    loss: f64,
    divergence: f64,
    label_loss: f64,
    hidden_gradient: Vec<Vec<f64>>,
    head_gradient: Vec<Vec<f64>>,
}

fn matrix(rows: &[Vec<f64>]) -> Tensor {
    Tensor::from_slice(&rows.concat()).reshape([rows.len() as i64, -1])
}

fn divergence(beta: f64) -> Divergence {
    match beta {
        0.0 => Divergence::ForwardKl,
        1.0 => Divergence::ReverseKl,
        beta => Divergence::JensenShannon { beta },
    }
}

fn projection(weight: &Tensor, softcap: Option<f64>) -> OutputProjection<'_> {
    let transform = LogitTransform { softcap, ..LogitTransform::default() };
    OutputProjection { weight, bias: None, transform, token_rows: None }
}

#[test]
fn values_and_gradients_are_those_of_trl() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/fixtures/distillation/divergences.json");
    let fixture: Fixture = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let labels = Tensor::from_slice(&fixture.labels);
    for (number, case) in fixture.cases.iter().enumerate() {
        for (kind, bound) in [(Kind::Double, 1e-9f64), (Kind::Float, 1e-5)] {
            for (chunk, gradients) in
                [(2, Gradients::Forward), (64, Gradients::Forward), (2, Gradients::Backward)]
            {
                let [hidden, head] =
                    [&case.hidden, &case.head].map(|rows| matrix(rows).to_kind(kind).set_requires_grad(true));
                let [x, w] =
                    [&case.teacher_hidden, &case.teacher_head].map(|rows| matrix(rows).to_kind(kind));
                let set = case.tokens.as_ref().zip(case.log_probabilities.as_ref()).map(|(tokens, known)| {
                    let tokens = Tensor::from_slice(&tokens.concat()).reshape([tokens.len() as i64, -1]);
                    (tokens, matrix(known).to_kind(Kind::Float))
                });
                let teacher = match &set {
                    Some((tokens, known)) => {
                        Teacher::TopK { tokens_btk: tokens, log_probabilities_btk: known }
                    }
                    None => Teacher::Hidden { hidden_btd: &x, projection: projection(&w, case.softcap) },
                };
                let options = DistillationConfig {
                    divergence: divergence(case.beta),
                    temperature: case.temperature,
                    label_weight: case.label_weight,
                };
                let loss = LinearCrossEntropy {
                    reduction: Reduction::Sum,
                    chunk: Some(Chunk::Tokens(chunk)),
                    softcap: case.softcap,
                    gradients,
                    ..LinearCrossEntropy::default()
                };
                let inputs =
                    Inputs { teacher: Some((teacher, options)), ..Inputs::new(&hidden, &head, &labels) };
                let output = loss.run(&inputs).unwrap();
                backward(&[&output.loss]).unwrap();
                let name = format!("case {number}, {kind:?}, {chunk}, {gradients:?}");
                // A set's probabilities are fp32, whatever the student's are.
                let bound = if set.is_some() { bound.max(1e-6) } else { bound };
                for (own, theirs) in [
                    (&output.loss, case.loss),
                    (output.divergence.as_ref().unwrap(), case.divergence),
                    (output.label_loss.as_ref().unwrap(), case.label_loss),
                ] {
                    let own = own.double_value(&[]);
                    assert!(
                        (own - theirs).abs() <= bound * theirs.abs().max(1.0),
                        "{name}: {own} for {theirs}"
                    );
                }
                for (own, theirs) in
                    [(hidden.grad(), &case.hidden_gradient), (head.grad(), &case.head_gradient)]
                {
                    let theirs = matrix(theirs);
                    let error = (own.to_kind(Kind::Double) - &theirs).abs().max().double_value(&[]);
                    let largest = theirs.abs().max().double_value(&[]).max(1.0);
                    assert!(error <= bound * largest, "{name}: {error:e} of {largest}");
                }
            }
        }
    }
}

#[test]
fn gradients_match_the_function_with_every_other_input() {
    let mut generator = Generator::new(2).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Double, Device::Cpu)).unwrap();
    let (x, w, bias) = (normal(&[2, 4, 3]), normal(&[9, 3]), normal(&[9]));
    let weights = normal(&[2, 4]).abs();
    let targets = Tensor::from_slice2(&[[1i64, -100, 6, 0], [3, 3, -100, 2]]);
    for (beta, gradients, reduction, cap) in [
        (0.0, Gradients::Forward, Reduction::Mean, None),
        (1.0, Gradients::Backward, Reduction::Sum, Some(3.0)),
        (0.3, Gradients::Forward, Reduction::None, Some(2.0)),
        (0.7, Gradients::Backward, Reduction::None, None),
    ] {
        let options = LinearCrossEntropy {
            chunk: Some(Chunk::Tokens(3)),
            scale: 0.8,
            label_smoothing: 0.1,
            softcap: cap,
            reduction,
            gradients,
            ..LinearCrossEntropy::default()
        };
        let distillation =
            DistillationConfig { divergence: divergence(beta), temperature: 1.7, label_weight: 0.35 };
        let leaves: Vec<Tensor> = [vec![2, 4, 5], vec![7, 5], vec![7], vec![2, 5], vec![7, 2]]
            .iter()
            .map(|size| normal(size).set_requires_grad(true))
            .collect();
        let function = |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
            let of_teacher = OutputProjection { bias: Some(&bias), ..projection(&w, cap) };
            let inputs = Inputs {
                bias: Some(&given[2]),
                adapter: Some(Adapter { a: &given[3], b: &given[4], scale: 1.5 }),
                token_weights: Some(&weights),
                denominator: (reduction == Reduction::Mean).then_some(Denominator::Number(3.0)),
                teacher: Some((Teacher::Hidden { hidden_btd: &x, projection: of_teacher }, distillation)),
                ..Inputs::new(&given[0], &given[1], &targets)
            };
            Ok(vec![options.run(&inputs)?.loss])
        };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        gradcheck(function, &inputs, GradcheckConfig::default())
            .unwrap_or_else(|error| panic!("{options:?}: {error}"));
    }
}

/// A teacher that is the student has no divergence; rows that replace those of the student's head are learned.
#[test]
fn a_student_that_is_its_teacher_learns_nothing() {
    let mut generator = Generator::new(4).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, (Kind::Float, Device::Cpu)).unwrap();
    let (x, w) = (normal(&[6, 8]), normal(&[40, 8]));
    let targets = Tensor::from_slice(&[1i64, 2, 3, -100, 5, 6]);
    for beta in [0.0, 0.2, 1.0] {
        let hidden = x.copy().set_requires_grad(true);
        let classes = Tensor::from_slice(&[3i64, 7]);
        let rows = w.index_select(0, &classes).set_requires_grad(true);
        let options = DistillationConfig { divergence: divergence(beta), ..DistillationConfig::default() };
        let inputs = Inputs {
            replaced_rows: Some(ReplacedRows { classes: &classes, rows: &rows }),
            teacher: Some((Teacher::Hidden { hidden_btd: &x, projection: projection(&w, None) }, options)),
            ..Inputs::new(&hidden, &w, &targets)
        };
        let output = LinearCrossEntropy::default().run(&inputs).unwrap();
        backward(&[&output.loss]).unwrap();
        assert!(output.loss.double_value(&[]).abs() < 1e-6, "{}", output.loss);
        for gradient in [hidden.grad(), rows.grad()] {
            assert!(gradient.abs().max().double_value(&[]) < 1e-6, "{gradient}");
        }
        // One more teacher: the rows are learned.
        let hidden = x.copy().set_requires_grad(true);
        let other = &w * 1.5;
        let inputs = Inputs {
            teacher: Some((
                Teacher::Hidden { hidden_btd: &x, projection: projection(&other, None) },
                options,
            )),
            ..Inputs { hidden: &hidden, ..inputs }
        };
        backward(&[&LinearCrossEntropy::default().run(&inputs).unwrap().loss]).unwrap();
        assert!(rows.grad().abs().max().double_value(&[]) > 1e-4);
    }
}

#[test]
fn what_a_teacher_cannot_be_combined_with_is_named() {
    let (x, w) =
        (Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([5, 3], (Kind::Float, Device::Cpu)));
    let targets = Tensor::from_slice(&[1i64, 2]);
    let wide = Tensor::zeros([3, 3], (Kind::Float, Device::Cpu));
    let set = (
        Tensor::zeros([2, 2], (Kind::Int64, Device::Cpu)),
        Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)),
    );
    let of = |x| Teacher::Hidden { hidden_btd: x, projection: projection(&w, None) };
    let refusal = |loss: LinearCrossEntropy, teacher: Teacher<'_>, options: DistillationConfig| {
        let inputs = Inputs { teacher: Some((teacher, options)), ..Inputs::new(&x, &w, &targets) };
        loss.run(&inputs).unwrap_err().to_string()
    };
    let (plain, usual) = (LinearCrossEntropy::default, DistillationConfig::default());
    let js = |beta| DistillationConfig { divergence: Divergence::JensenShannon { beta }, ..usual };
    let top_k = Teacher::TopK { tokens_btk: &set.0, log_probabilities_btk: &set.1 };
    for (found, expected) in [
        (
            refusal(plain(), of(&wide), usual),
            "`teacher.hidden` has shape [3, 3]; expected [2] and its own hidden size",
        ),
        (refusal(plain(), of(&x), js(1.0)), "the ends are the forward and the reverse divergence"),
        (
            refusal(plain(), of(&x), DistillationConfig { temperature: 0.0, ..usual }),
            "the temperature is 0; expected a number above 0",
        ),
        (
            refusal(plain(), of(&x), DistillationConfig { label_weight: 1.5, ..usual }),
            "the weight of the labels is 1.5",
        ),
        (refusal(plain(), top_k, js(0.5)), "use `forward-kl`, or the teacher itself"),
        (refusal(LinearCrossEntropy { shift: 1, ..plain() }, of(&x), usual), "shift the targets themselves"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
    let distributions = Tensor::ones([2, 5], (Kind::Float, Device::Cpu));
    let inputs = Inputs {
        targets: Targets::Distributions(&distributions),
        teacher: Some((of(&x), usual)),
        ..Inputs::new(&x, &w, &targets)
    };
    let error = plain().run(&inputs).unwrap_err().to_string();
    assert!(error.contains("the targets are distributions, and so are a teacher's"), "{error}");
}
