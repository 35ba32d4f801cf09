//! The cache compared with whole rows, independence of rows, ends of rows, and invalid calls.

use expect_test::expect;
use models::generation::{FinishReason, Generated, GenerationConfig, Generator, Sampling, generate};
use models::module::{LanguageModel, ModuleMapper, map_modules};
use models::{DecoderConfig, Gpt2, Gpt2Config, Llama};
use runtime::random::Generator as Random;
use tch::{Device, Kind};

/// Weights so large that the largest logits are not nearly equal.
struct Drawn(Random);

impl ModuleMapper for Drawn {
    fn tensor(
        &mut self,
        name: &str,
        tensor: &mut tch::Tensor,
        _: models::module::Role,
    ) -> models::Result<()> {
        let _no_grad = tch::no_grad_guard();
        let drawn = self.0.normal(&tensor.size(), (tensor.kind(), Device::Cpu))?;
        let base = if name.contains("norm") { 1.0 } else { 0.0 };
        tensor.f_copy_(&(drawn * 0.2 + base))?;
        Ok(())
    }
}

fn drawn<M: LanguageModel>(mut model: M, seed: u64) -> M {
    map_modules(&mut model, &mut Drawn(Random::new(seed).unwrap())).unwrap();
    model
}

fn qwen(kv_heads: i64) -> Llama {
    let config = DecoderConfig {
        num_key_value_heads: kv_heads,
        max_position_embeddings: 40,
        ..DecoderConfig::qwen2(97, 32, 48, 3, 4)
    };
    drawn(Llama::new(&config, (Kind::Double, Device::Cpu)).unwrap(), 7)
}

/// Prompts of these lengths, with `common` equal initial tokens.
fn prompts(lengths: &[usize], common: usize) -> Vec<Vec<i64>> {
    let token = |row: usize, place: usize| {
        let row = if place < common { 0 } else { row + 1 };
        ((row * 31 + place * 17 + row * place * 5 + 3) % 97) as i64
    };
    lengths
        .iter()
        .enumerate()
        .map(|(row, &length)| (0..length).map(|place| token(row, place)).collect())
        .collect()
}

fn tokens(generated: &[Generated]) -> Vec<&[i64]> {
    generated.iter().map(|row| &row.tokens[..]).collect()
}

const RANDOM: Sampling = Sampling::Random { temperature: 0.8, top_k: Some(20), top_p: 0.9, seed: 5 };

/// In f64, with and without a cache differ by far less than any two logits.
#[test]
fn a_cache_does_not_change_tokens() {
    for kv_heads in [1, 2, 4] {
        let model = qwen(kv_heads);
        for lengths in [&[9][..], &[1, 1, 1], &[3, 9, 1, 6], &[12, 12]] {
            for sampling in [Sampling::Greedy, RANDOM] {
                let options =
                    GenerationConfig { max_new_tokens: 11, sampling, ..GenerationConfig::default() };
                let whole = GenerationConfig { cache: false, ..options.clone() };
                let prompts = prompts(lengths, 0);
                let with = generate(&model, &prompts, &options, &mut ()).unwrap();
                let without = generate(&model, &prompts, &whole, &mut ()).unwrap();
                assert_eq!(with, without, "{kv_heads} heads, {lengths:?}, {sampling:?}");
                assert!(
                    with.iter()
                        .all(|row| row.tokens.len() == 11 && row.finish_reason == FinishReason::MaxNewTokens)
                );
            }
        }
    }
}

#[test]
fn a_shared_prefix_is_computed_once_and_does_not_change_tokens() {
    let model = qwen(2);
    for (lengths, common) in [(&[8, 11, 7][..], 6), (&[7, 7], 6), (&[20], 19)] {
        let prompts = prompts(lengths, common);
        for sampling in [Sampling::Greedy, RANDOM] {
            let options = GenerationConfig { max_new_tokens: 9, sampling, ..GenerationConfig::default() };
            let plain = generate(&model, &prompts, &options, &mut ()).unwrap();
            let generator =
                Generator::new(&model, &options).unwrap().with_prefix(&prompts[0][..common]).unwrap();
            for _ in 0..2 {
                assert_eq!(generator.generate(&prompts, &mut ()).unwrap(), plain, "{lengths:?}");
            }
        }
    }
}

/// Finished rows leave the batch, and the last row replaces them; the others must not change.
#[test]
fn rows_do_not_depend_on_each_other() {
    let model = qwen(2);
    let prompts = prompts(&[5, 9, 2, 7, 9], 0);
    let ends = [4, 1, 9, 2, 6];
    let options = GenerationConfig { max_new_tokens: 9, ..GenerationConfig::default() };
    let mut seen = vec![0; prompts.len()];
    let mut callback = |row: usize, tokens: &[i64]| {
        seen[row] += 1;
        assert_eq!(tokens.len(), seen[row], "each token once");
        tokens.len() == ends[row]
    };
    let together = generate(&model, &prompts, &options, &mut callback).unwrap();
    for (row, prompt) in prompts.iter().enumerate() {
        let alone = generate(&model, std::slice::from_ref(prompt), &options, &mut ()).unwrap();
        assert_eq!(together[row].tokens, alone[0].tokens[..ends[row]], "row {row}");
        assert_eq!(together[row].finish_reason, FinishReason::Callback);
    }
    assert_eq!(seen, ends);
}

#[test]
fn a_row_ends_at_an_end_token_its_length_or_the_last_position() {
    let model = qwen(4);
    let prompts = prompts(&[6, 30], 0);
    let free = GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() };
    let all = generate(&model, &prompts, &free, &mut ()).unwrap();
    assert_eq!(
        [all[0].finish_reason, all[1].finish_reason],
        [FinishReason::MaxNewTokens, FinishReason::MaxSequence]
    );
    assert_eq!([all[0].tokens.len(), all[1].tokens.len()], [20, 10]);

    let end = all[0].tokens[4];
    let first = all[0].tokens.iter().position(|&token| token == end).unwrap();
    let ended =
        generate(&model, &prompts, &GenerationConfig { end_tokens: vec![96, end], ..free }, &mut ()).unwrap();
    let expected = Generated {
        tokens: all[0].tokens[..first].to_vec(),
        end_token: Some(end),
        finish_reason: FinishReason::EndToken,
    };
    assert!(ended[0] == expected || ended[0].tokens.len() < first, "{:?}", ended[0]);
}

#[test]
fn seeds_are_reproducible_and_distinct() {
    let model = qwen(2);
    let same = vec![prompts(&[4], 0).remove(0); 3];
    let draw = |seed| {
        let sampling = Sampling::Random { temperature: 2.0, top_k: None, top_p: 1.0, seed };
        let options = GenerationConfig { max_new_tokens: 12, sampling, ..GenerationConfig::default() };
        generate(&model, &same, &options, &mut ()).unwrap()
    };
    let (first, again, other) = (draw(1), draw(1), draw(2));
    assert_eq!(first, again);
    assert_ne!(tokens(&first), tokens(&other));
    assert_ne!(first[0], first[1], "rows of one prompt draw for themselves");
    // However many are generated at a time.
    let sampling = Sampling::Random { temperature: 2.0, top_k: None, top_p: 1.0, seed: 1 };
    let options = GenerationConfig { max_new_tokens: 12, sampling, ..GenerationConfig::default() };
    let generator = Generator::new(&model, &options).unwrap();
    for (number, expected) in first.iter().enumerate() {
        let alone = generator.generate_numbered(&same[..1], number, &mut ()).unwrap();
        assert_eq!(alone[0], *expected, "row {number}");
    }
}

#[test]
fn a_model_without_a_cache_generates() {
    let config = Gpt2Config {
        vocabulary: 50,
        max_sequence: 12,
        hidden: 16,
        heads: 2,
        layers: 2,
        ..Gpt2Config::small()
    };
    let model = drawn(Gpt2::new(&config, (Kind::Double, Device::Cpu)).unwrap(), 3);
    assert!(model.cache_shape().is_none());
    let prompts = [vec![1, 2, 3], vec![7]];
    let options = GenerationConfig { max_new_tokens: 20, ..GenerationConfig::default() };
    let found = Generator::new(&model, &options).unwrap().generate(&prompts, &mut ()).unwrap();
    assert_eq!([found[0].tokens.len(), found[1].tokens.len()], [9, 11], "up to the model's 12 positions");
    let input = tch::Tensor::from_slice(&prompts[0]).view([1, 3]);
    let logits = model.logits(&models::module::Input::new(&input)).unwrap();
    assert_eq!(found[0].tokens[0], logits.get(0).get(2).argmax(-1, false).int64_value(&[]));
}

#[test]
fn invalid_generations_are_errors() {
    let model = qwen(2);
    let said = |prompts: &[Vec<i64>], options: GenerationConfig, prefix: &[i64]| {
        let found = Generator::new(&model, &options)
            .and_then(|generator| generator.with_prefix(prefix))
            .and_then(|generator| generator.generate(prompts, &mut ()));
        found.unwrap_err().to_string()
    };
    let options = GenerationConfig::default;
    let random = |temperature, top_k, top_p| GenerationConfig {
        sampling: Sampling::Random { temperature, top_k, top_p, seed: 0 },
        ..GenerationConfig::default()
    };
    let one = [vec![1]];
    let words = [
        said(&[vec![1], vec![]], options(), &[]),
        said(&[vec![1, 97]], options(), &[]),
        said(&[vec![1; 40]], options(), &[]),
        said(&[vec![1, 2], vec![1, 3]], options(), &[1, 2]),
        said(&one, GenerationConfig { max_new_tokens: 0, ..options() }, &[]),
        said(&one, GenerationConfig { end_tokens: vec![-1], ..options() }, &[]),
        said(&one, random(0.0, None, 1.0), &[]),
        said(&one, random(1.0, Some(0), 1.0), &[]),
        said(&one, random(1.0, None, 0.0), &[]),
    ];
    expect![[r#"
        generation: prompt 1 is empty; expected at least one token
        token 97 is outside the model's vocabulary of 97 (0 to 96); the tokenizer and the model do not belong together, or the model needs a larger `vocabulary`
        generation: prompt 0: 40 tokens leave no room for a new one in the model's 40 positions; shorten the prompt, or give fewer examples
        generation: prompt 0 does not start with the prefix of 2 tokens, or has nothing after it
        generation: `max_new_tokens` is 0; expected at least 1
        token -1 is outside the model's vocabulary of 97 (0 to 96); the tokenizer and the model do not belong together, or the model needs a larger `vocabulary`
        generation: `temperature` is 0; expected above 0 (use greedy for the most probable token)
        generation: `top_k` is 0; expected at least 1, or none for all tokens
        generation: `top_p` is 0; expected a probability in (0, 1]"#]].assert_eq(&words.join("\n"));
}
