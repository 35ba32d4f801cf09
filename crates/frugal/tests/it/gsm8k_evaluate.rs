//! `evaluate_generation` over a generator that follows a script.

use crate::gsm8k_data;
use std::error::Error;

use expect_test::expect;
use frugal::tasks::gsm8k::{
    EncodeConfig, Encoder, EvaluateConfig, Evaluation, FewShot, Generator, Grader, Problem, PromptFormat,
    StopTexts, TooLong, evaluate_generation,
};

/// Answers each prompt with what `say` makes of its last question, token by token, and ends where it is told to.
struct Script<'a, F> {
    encoder: &'a Encoder,
    say: F,
    batches: Vec<Vec<usize>>,
}

impl<F: FnMut(&str) -> String> Generator for Script<'_, F> {
    fn generate(
        &mut self,
        prompts: &[Vec<i64>],
        max_new: usize,
        ends: &[i64],
        stop: &StopTexts<'_>,
    ) -> Result<Vec<Vec<i64>>, Box<dyn Error + Send + Sync>> {
        self.batches.push(prompts.iter().map(Vec::len).collect());
        let mut rows = Vec::new();
        for prompt in prompts {
            let ids: Vec<u32> = prompt.iter().map(|id| *id as u32).collect();
            let text = self.encoder.tokenizer().decode(&ids)?;
            let question = text.rsplit("Question: ").next().unwrap().strip_suffix("\nAnswer:").unwrap();
            let mut row = Vec::new();
            for token in self.encoder.prompt(&(self.say)(question))?.into_iter().chain(ends.iter().copied()) {
                row.push(token);
                if row.len() == max_new || ends.contains(&token) || stop.ended(&row)? {
                    break;
                }
            }
            rows.push(row);
        }
        Ok(rows)
    }
}

fn encoder(context: usize, too_long: TooLong) -> Encoder {
    let options = EncodeConfig { vocabulary: 4096, context, begin: None, end: 0, too_long };
    Encoder::new(gsm8k_data::tokenizer(), options).unwrap()
}

fn dataset() -> Vec<Problem> {
    gsm8k_data::problems().into_iter().take(23).collect()
}

fn evaluate(
    dataset: &[Problem],
    encoder: &Encoder,
    shots: usize,
    options: &EvaluateConfig,
    say: impl FnMut(&str) -> String,
) -> (Result<Evaluation, String>, Vec<Vec<usize>>, usize) {
    let train: Vec<Problem> = gsm8k_data::problems().split_off(100);
    let few_shot = FewShot::new(&train, shots, PromptFormat::default(), 1).unwrap();
    let mut script = Script { encoder, say, batches: Vec::new() };
    let mut observed = 0;
    let evaluation = evaluate_generation(&mut script, dataset, encoder, &few_shot, options, &mut |graded| {
        observed += graded.len();
    });
    (evaluation.map_err(|error| error.to_string()), script.batches, observed)
}

fn gold(dataset: &[Problem], question: &str) -> Problem {
    dataset.iter().find(|problem| problem.question == question).unwrap().clone()
}

#[test]
fn the_gold_answers_are_all_right_in_the_data_sets_order() {
    let (dataset, encoder) = (dataset(), encoder(2048, TooLong::Refuse));
    for (shots, batch_size) in [(0, 1), (3, 4), (3, 100)] {
        let options = EvaluateConfig { batch_size, ..EvaluateConfig::default() };
        let say = |question: &str| format!(" {}", gold(&dataset, question).answer);
        let (evaluation, batches, observed) = evaluate(&dataset, &encoder, shots, &options, say);
        let evaluation = evaluation.unwrap();
        for grader in Grader::ALL {
            assert_eq!((evaluation.accuracy(grader).right, evaluation.accuracy(grader).of), (23, 23));
        }
        let numbers: Vec<usize> = evaluation.graded.iter().map(|graded| graded.number).collect();
        assert_eq!(numbers, (0..23).collect::<Vec<_>>());
        for (graded, problem) in evaluation.graded.iter().zip(&dataset) {
            assert_eq!((&graded.text, &graded.gold), (&format!(" {}", problem.answer), &problem.result()));
        }
        // Batches are full but the last, and sorted by length, the longest first.
        assert!(batches.iter().rev().skip(1).all(|batch| batch.len() == batch_size));
        let lengths = batches.concat();
        assert!(lengths.is_sorted_by(|a, b| a >= b), "{lengths:?}");
        assert_eq!((lengths.len(), observed), (23, 23));
    }
}

#[test]
fn graders_see_what_the_model_said_up_to_the_stop_text() {
    let (dataset, encoder) = (dataset(), encoder(2048, TooLong::Refuse));
    let options = EvaluateConfig::default();
    let functional_call = |question: &str| {
        let problem = gold(&dataset, question);
        format!(" So it is {}.\n\nQuestion: What are 2 and 3?\nAnswer: 5", problem.result())
    };
    let (evaluation, ..) = evaluate(&dataset, &encoder, 3, &options, functional_call);
    let evaluation = evaluation.unwrap();
    let shares = Grader::ALL.map(|grader| evaluation.accuracy(grader).right);
    assert_eq!(shares, [0, 23, 0]);
    assert!(evaluation.graded.iter().all(|graded| graded.text.ends_with(".\n\n")));
    // Without stop texts the last number is the other question's.
    let endless = EvaluateConfig { stop: Vec::new(), ..options.clone() };
    let (evaluation, ..) = evaluate(&dataset, &encoder, 3, &endless, functional_call);
    assert_eq!(evaluation.unwrap().accuracy(Grader::Flexible).right, 0);
    // An answer that is cut off by the number of tokens is none.
    let short = EvaluateConfig { max_new_tokens: 3, ..options };
    let (evaluation, ..) = evaluate(&dataset, &encoder, 3, &short, functional_call);
    let evaluation = evaluation.unwrap();
    assert!(evaluation.graded.iter().all(|graded| graded.new_tokens == 3));
}

#[test]
fn a_line_of_the_transcript_has_all_that_was_graded() {
    let encoder = encoder(2048, TooLong::Refuse);
    let dataset = [Problem::new("How many?", "#### 1,200").unwrap()];
    let (evaluation, ..) =
        evaluate(&dataset, &encoder, 0, &EvaluateConfig::default(), |_| " $1,200.\n#### 1200".into());
    expect![[r###"{"number":0,"prompt_tokens":13,"new_tokens":10,"text":" $1,200.\n#### 1200","gold":"1200","extracted":{"strict":"1200","flexible":"1200","openai":"1200"},"right":{"strict":true,"flexible":true,"openai":true}}"###]]
        .assert_eq(&serde_json::to_string(&evaluation.unwrap().graded[0]).unwrap());
}

#[test]
fn a_prompt_without_room_for_its_answer_is_refused_or_skipped_and_counted() {
    let dataset = dataset();
    let wide = encoder(2048, TooLong::Refuse);
    let options = EvaluateConfig { max_new_tokens: 40, ..EvaluateConfig::default() };
    let say = |_: &str| " #### 1".to_owned();
    let all = evaluate(&dataset, &wide, 0, &options, say).0.unwrap();
    let mut lengths: Vec<usize> = all.graded.iter().map(|graded| graded.prompt_tokens).collect();
    lengths.sort_unstable();
    let context = lengths[11] + 40;
    let beyond = lengths.iter().filter(|length| **length + 40 > context).count();
    assert!(beyond > 0);
    let some = evaluate(&dataset, &encoder(context, TooLong::Skip), 0, &options, say).0.unwrap();
    assert_eq!((some.graded.len(), some.skipped.len()), (23 - beyond, beyond));
    assert_eq!(some.accuracy(Grader::Strict).of, 23 - beyond);
    assert!(some.skipped.iter().all(|number| all.graded[*number].prompt_tokens + 40 > context));
    let (error, batches, _) = evaluate(&dataset, &encoder(context, TooLong::Refuse), 0, &options, say);
    let error = error.unwrap_err();
    assert!(error.contains("tokens and 40 to be generated are more than the context of"), "{error}");
    assert_eq!(batches.len(), 0, "nothing is generated before all prompts are checked");
}

#[test]
fn bad_settings_and_bad_models_are_named() {
    let (dataset, encoder) = (dataset(), encoder(2048, TooLong::Refuse));
    let say = |_: &str| String::new();
    for (batch_size, max_new_tokens) in [(0, 5), (5, 0)] {
        let options = EvaluateConfig { batch_size, max_new_tokens, ..EvaluateConfig::default() };
        let error = evaluate(&dataset, &encoder, 0, &options, say).0.unwrap_err();
        assert_eq!(
            error,
            format!(
                "evaluation: batches of {batch_size} prompts and {max_new_tokens} new tokens; both must be 1 or more"
            )
        );
    }
    struct Broken(bool);
    impl Generator for Broken {
        fn generate(
            &mut self,
            _: &[Vec<i64>],
            _: usize,
            _: &[i64],
            _: &StopTexts<'_>,
        ) -> Result<Vec<Vec<i64>>, Box<dyn Error + Send + Sync>> {
            if self.0 { Err("out of memory".into()) } else { Ok(Vec::new()) }
        }
    }
    let zero = FewShot::zero(PromptFormat::default());
    let run = |fails| {
        let options = EvaluateConfig { batch_size: 2, ..EvaluateConfig::default() };
        let two = &dataset[..2];
        evaluate_generation(&mut Broken(fails), two, &encoder, &zero, &options, &mut |_| ())
            .unwrap_err()
            .to_string()
    };
    assert!(run(true).starts_with("while generating for problems "), "{}", run(true));
    assert!(run(true).ends_with(": out of memory"));
    assert!(run(false).ends_with(": 0 rows came back, of 2 prompts"), "{}", run(false));
}
