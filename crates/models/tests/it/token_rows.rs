//! Rows that replace a table's for a few tokens, against a table with the rows in it.

use kernels::quantized::blocks::{BlockType, from_bytes};
use models::module::{Context, LossHead, parameters};
use models::token_rows::{TokenRows, rows_of};
use models::{Embedding, Linear, ProjectionHead};
use runtime::autograd::{GradcheckConfig, backward, gradcheck};
use runtime::random::Generator;
use tch::{Device, Kind, Tensor};

const TOKENS: [i64; 3] = [6, 0, 3];
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// A table [7, 4], rows [3, 4], tokens [2, 5] and hidden states [2, 5, 4].
fn given(seed: u64) -> (Tensor, Tensor, Tensor, Tensor) {
    let mut generator = Generator::new(seed).unwrap();
    let mut normal = |size: &[i64]| generator.normal(size, DOUBLE).unwrap();
    let tokens = Tensor::from_slice2(&[[6i64, 6, 1, 0, 5], [2, 3, 4, 6, 3]]);
    (normal(&[7, 4]), normal(&[3, 4]), tokens, normal(&[2, 5, 4]))
}

fn embedding(table: &Tensor, rows: &Tensor) -> Embedding {
    let token_rows = Some(TokenRows::new(&TOKENS, rows.shallow_clone()).unwrap());
    Embedding { token_rows, ..Embedding::from(table.shallow_clone()) }
}

fn head(table: &Tensor, rows: Option<&Tensor>) -> ProjectionHead {
    let mut head = ProjectionHead::new(Linear { weight: table.shallow_clone(), bias: None });
    head.set_token_rows(rows.map(|rows| TokenRows::new(&TOKENS, rows.shallow_clone()).unwrap())).unwrap();
    head
}

#[test]
fn gradients_of_rows_match_finite_differences_and_tied_ones_add_up() {
    let (table, rows, tokens, hidden) = given(1);
    let labels = Tensor::from_slice2(&[[6i64, 0, -100, 3, 2], [5, 1, 6, 6, 0]]);
    let function = |given: &[Tensor]| -> runtime::Result<Vec<Tensor>> {
        // Both parts share the rows, as where the head is tied to the embedding.
        let x = embedding(&table, &given[0]).forward(&tokens)?;
        let loss = head(&table, Some(&given[0])).loss(&(&x + &given[1]), &labels, &Context::default())?;
        Ok(vec![x, loss.sum])
    };
    let [rows, hidden] = [rows, hidden].map(|leaf| leaf.set_requires_grad(true));
    gradcheck(function, &[&rows, &hidden], GradcheckConfig::default()).unwrap();
}

#[test]
fn values_and_gradients_are_those_of_a_table_with_the_rows_in_it() {
    let (table, rows, tokens, hidden) = given(2);
    let labels = Tensor::from_slice2(&[[6i64, 0, -100, 3, 2], [5, 1, 6, 6, 0]]);
    let index = Tensor::from_slice(&TOKENS);
    let leaf = |tensor: &Tensor| tensor.copy().set_requires_grad(true);
    let [ours, theirs] = [leaf(&rows), leaf(&rows)];
    let whole = table.index_copy(0, &index, &theirs);

    let looked_up = embedding(&table, &ours).forward(&tokens).unwrap();
    let expected = Embedding::from(whole.shallow_clone()).forward(&tokens).unwrap();
    assert_eq!(looked_up, expected);
    let context = Context { accuracy: true, ..Context::default() };
    let found = head(&table, Some(&ours)).loss(&(&looked_up * &hidden), &labels, &context).unwrap();
    let reference = head(&whole, None).loss(&(&expected * &hidden), &labels, &context).unwrap();
    assert!((&found.sum - &reference.sum).abs().double_value(&[]) < 1e-12);
    assert_eq!(found.correct.unwrap(), reference.correct.unwrap());
    backward(&[&found.sum]).unwrap();
    backward(&[&reference.sum]).unwrap();
    assert!((ours.grad() - theirs.grad()).abs().max().double_value(&[]) < 1e-12);
    assert!(ours.grad().abs().min().double_value(&[]) > 0.0, "each row has a gradient");
}

#[test]
fn a_table_in_blocks_and_one_in_bf16_take_rows_in_fp32() {
    let mut generator = Generator::new(3).unwrap();
    let bytes: Vec<u8> = (0..7u8)
        .flat_map(|row| [0x00, 0x3c].into_iter().chain((0..32).map(move |at| row * 5 + at)))
        .collect();
    let table = from_bytes(BlockType::Q8_0, [7, 32], &bytes).unwrap();
    let rows = generator.normal(&[3, 32], (Kind::Float, Device::Cpu)).unwrap();
    let tokens = Tensor::from_slice2(&[[6i64, 2, 0]]);
    let x = embedding(&table, &rows.copy().set_requires_grad(true)).forward(&tokens).unwrap();
    let dense = rows_of(&table, &[0, 1, 2, 3, 4, 5, 6], Kind::BFloat16).unwrap();
    assert_eq!(x.kind(), Kind::BFloat16);
    let expected = dense.index_copy(0, &Tensor::from_slice(&TOKENS), &rows.to_kind(Kind::BFloat16));
    assert_eq!(x.detach(), expected.index_select(0, &Tensor::from_slice(&[6i64, 2, 0])).unsqueeze(0));
    for table in [table, dense] {
        let context = Context::default();
        let logits = head(&table, Some(&rows)).logits(&x, &context).unwrap();
        let plain = head(&table, None).logits(&x, &context).unwrap();
        let at = |logits: &Tensor, classes: &[i64]| logits.index_select(-1, &Tensor::from_slice(classes));
        assert_eq!(at(&logits, &[1, 2, 4, 5]), at(&plain, &[1, 2, 4, 5]), "other logits have the same bits");
        let own = x.to_kind(Kind::Float).matmul(&rows.to_kind(Kind::BFloat16).to_kind(Kind::Float).tr());
        let error = (at(&logits, &TOKENS).to_kind(Kind::Float) - &own).abs().max().double_value(&[]);
        assert!(error <= own.abs().max().double_value(&[]) / 128.0, "{error}");
    }
}

#[test]
fn rows_are_parameters_of_their_parts() {
    let (table, rows, ..) = given(4);
    let names =
        |named: Vec<(String, &Tensor)>| -> Vec<String> { named.into_iter().map(|(name, _)| name).collect() };
    let expected = ["weight", "token_adapter.trainable_tokens_delta"];
    assert_eq!(names(parameters(&embedding(&table, &rows))), expected);
    assert_eq!(names(parameters(&head(&table, Some(&rows)))), expected);
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let rows = Tensor::zeros([2, 4], DOUBLE);
    let error = |tokens: &[i64]| TokenRows::new(tokens, rows.shallow_clone()).unwrap_err().to_string();
    assert!(error(&[5, 5]).contains("token 5 is there twice; name each token once"));
    assert!(error(&[-1, 5]).contains("token -1 is below 0"));
    assert!(error(&[1]).contains("expected [1, width], a row for each token"));
    let rows = TokenRows::new(&[7, 2], rows).unwrap();
    assert!(
        rows.check_against([7, 4]).unwrap_err().to_string().contains("token 7 is beyond a table of 7 rows")
    );
    assert!(
        rows.check_against([8, 5])
            .unwrap_err()
            .to_string()
            .contains("expected [n, 5], the width of the table")
    );
    let biased = Linear::new(4, 7, true, DOUBLE).unwrap();
    let error = ProjectionHead::new(biased).set_token_rows(Some(rows)).unwrap_err().to_string();
    assert!(error.contains("more than a weight"), "{error}");
}
