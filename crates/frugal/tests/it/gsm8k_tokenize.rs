//! Prompts and rows: what generation sees is what training saw.

use crate::gsm8k_data;
use dataloading::Tokenizer;
use expect_test::expect;
use frugal::tasks::gsm8k::{EncodeConfig, Encoder, FewShot, Problem, PromptFormat, TooLong};
use serde_json::json;

fn options() -> EncodeConfig {
    EncodeConfig { vocabulary: 4096, context: 512, begin: None, end: 0, too_long: TooLong::Refuse }
}

fn encoder(options: EncodeConfig) -> Encoder {
    Encoder::new(gsm8k_data::tokenizer(), options).unwrap()
}

fn problem(question: &str, answer: &str) -> Problem {
    Problem::new(question, answer).unwrap()
}

fn three() -> [Problem; 3] {
    [
        problem("One and one?", "1+1 = <<1+1=2>>2\n#### 2"),
        problem("Two and two?", "#### 4"),
        problem("Naïve — 数 🦀?", "#### 5"),
    ]
}

#[test]
fn a_prompt_is_written_as_the_harness_writes_it() {
    let few_shot = FewShot::new(&three()[..1], 1, PromptFormat::default(), 0).unwrap();
    expect![[r#"
        Question: One and one?
        Answer: 1+1 = <<1+1=2>>2
        #### 2

        Question: How many?
        Answer:"#]]
    .assert_eq(&few_shot.prompt("How many?").unwrap());
    let zero = FewShot::zero(PromptFormat::default());
    assert_eq!(zero.prompt("How many?").unwrap(), "Question: How many?\nAnswer:");
    let format = PromptFormat {
        question: "Q. ".into(),
        answer: " A.".into(),
        delimiter: "\n".into(),
        separator: "\n---\n".into(),
    };
    let own = FewShot::new(&three()[1..2], 1, format, 0).unwrap();
    assert_eq!(own.prompt("How many?").unwrap(), "Q. Two and two? A.\n#### 4\n---\nQ. How many? A.");
}

#[test]
fn examples_are_drawn_by_seed_and_are_never_the_question() {
    let problems = gsm8k_data::problems();
    let draw = |shots, seed| FewShot::new(&problems, shots, PromptFormat::default(), seed).unwrap();
    let questions = |few_shot: &FewShot, question: &str| -> Vec<String> {
        few_shot.examples(question).unwrap().iter().map(|example| example.question.clone()).collect()
    };
    assert_eq!(questions(&draw(3, 1), "?"), questions(&draw(3, 1), "?"));
    assert_ne!(questions(&draw(3, 1), "?"), questions(&draw(3, 2), "?"));
    for shots in [1, 3, 8] {
        let few_shot = draw(shots, 5);
        for own in problems.iter().map(|problem| &problem.question) {
            let shown = questions(&few_shot, own);
            assert_eq!(shown.len(), shots);
            assert!(!shown.contains(own), "{own}");
            let distinct: std::collections::BTreeSet<&String> = shown.iter().collect();
            assert_eq!(distinct.len(), shots);
        }
    }
}

#[test]
fn too_few_examples_are_an_error() {
    let error =
        |train: &[Problem], shots| FewShot::new(train, shots, PromptFormat::default(), 0).unwrap_err();
    expect!["few-shot prompt: 3 examples are to be drawn from 2 different training problems; ask for fewer, or give more"]
        .assert_eq(&error(&[three()[0].clone(), three()[1].clone(), three()[0].clone()], 3).to_string());
    let all = FewShot::new(&three(), 3, PromptFormat::default(), 0).unwrap();
    assert!(all.prompt("Another?").is_ok());
    expect!["few-shot prompt: the question is one of the 3 examples and there is no other problem to show instead; draw them from more problems, or ask for fewer"]
        .assert_eq(&all.prompt("Two and two?").unwrap_err().to_string());
}

#[test]
fn a_row_is_the_prompt_without_labels_and_the_answer_with_them() {
    let problems = three();
    for begin in [None, Some(7)] {
        let encoder = encoder(EncodeConfig { begin, ..options() });
        for few_shot in [
            FewShot::zero(PromptFormat::default()),
            FewShot::new(&problems, 2, PromptFormat::default(), 3).unwrap(),
        ] {
            for (number, problem) in problems.iter().enumerate() {
                let row = encoder.tokenize(number, problem, &few_shot).unwrap().unwrap();
                // What generation is given is the row's beginning.
                let prompt = encoder.prompt(&few_shot.prompt(&problem.question).unwrap()).unwrap();
                assert_eq!(row.input_ids[..prompt.len()], prompt[..]);
                assert!(row.labels[..prompt.len()].iter().all(|label| *label == -100));
                assert_eq!(row.labels[prompt.len()..], row.input_ids[prompt.len()..]);
                assert_eq!(row.attention_mask, vec![1; row.input_ids.len()]);
                assert_eq!(begin.is_some(), row.input_ids[0] == 7);
                assert_eq!(row.input_ids.last(), Some(&0));
                let answer: Vec<u32> = row.labels[prompt.len()..row.labels.len() - 1]
                    .iter()
                    .map(|label| u32::try_from(*label).unwrap())
                    .collect();
                assert_eq!(encoder.tokenizer().decode(&answer).unwrap(), format!(" {}", problem.answer));
            }
        }
    }
}

#[test]
fn a_row_has_the_tokens_of_the_whole_text() {
    let encoder = encoder(EncodeConfig { context: 4096, ..options() });
    let few_shot = FewShot::zero(PromptFormat::default());
    let mut problems = gsm8k_data::problems();
    problems.extend(gsm8k_data::real("test.jsonl").into_iter().flatten());
    for (number, problem) in problems.iter().enumerate() {
        let row = encoder.tokenize(number, problem, &few_shot).unwrap().unwrap();
        let whole = format!("Question: {}\nAnswer: {}", problem.question, problem.answer);
        let mut expected = encoder.prompt(&whole).unwrap();
        expected.push(0);
        assert_eq!(row.input_ids, expected, "{whole}");
    }
}

#[test]
fn a_row_longer_than_the_context_is_refused_or_skipped_and_counted() {
    let problems = three();
    let few_shot = FewShot::zero(PromptFormat::default());
    let lengths: Vec<usize> = encoder(options())
        .tokenize_all(&problems, &few_shot)
        .unwrap()
        .rows
        .iter()
        .map(|row| row.input_ids.len())
        .collect();
    let longest = *lengths.iter().max().unwrap();
    let tight = |context, too_long| encoder(EncodeConfig { context, too_long, ..options() });
    let all = tight(longest, TooLong::Refuse).tokenize_all(&problems, &few_shot).unwrap();
    assert_eq!((all.rows.len(), all.skipped.len()), (3, 0));
    let some = tight(longest - 1, TooLong::Skip).tokenize_all(&problems, &few_shot).unwrap();
    let skipped: Vec<usize> = (0..3).filter(|number| lengths[*number] == longest).collect();
    assert_eq!((some.rows.len(), &some.skipped), (3 - skipped.len(), &skipped));
    let error = tight(10, TooLong::Refuse).tokenize_all(&problems, &few_shot).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "problem 0: {} tokens are more than the context of 10; give fewer examples, a model with a longer context, or skip \
             such problems",
            lengths[0]
        )
    );
}

#[test]
fn an_id_beyond_the_models_is_refused_where_it_is_used() {
    let error = |options| Encoder::new(gsm8k_data::tokenizer(), options).unwrap_err().to_string();
    // The tokenizer has ids up to 4095.
    let (problems, few_shot) = (three(), FewShot::zero(PromptFormat::default()));
    let tokenized =
        |vocabulary| encoder(EncodeConfig { vocabulary, ..options() }).tokenize_all(&problems, &few_shot);
    let largest = tokenized(4096).unwrap().rows.iter().flat_map(|row| row.input_ids.clone()).max().unwrap();
    assert!((300..4095).contains(&largest), "{largest}");
    assert!(tokenized(largest as usize + 1).is_ok(), "no row uses the ids beyond");
    let small = tokenized(largest as usize).unwrap_err().to_string();
    let expected = format!("the tokenizer does not match the model: it gives the id {largest} (");
    assert!(small.starts_with(&expected), "{small}");
    let expected = format!(
        "and the model's vocabulary is {largest} (0 to {}); take the tokenizer.json that came with the model",
        largest - 1
    );
    assert!(small.ends_with(&expected), "{small}");
    assert!(error(EncodeConfig { end: 151_643, ..options() }).contains("the id 151643 (\"\")"));
    assert!(error(EncodeConfig { begin: Some(9999), ..options() }).contains("9999"));
    expect!["context: 0 positions; give the model's `max_position_embeddings`"]
        .assert_eq(&error(EncodeConfig { context: 0, ..options() }));
}

#[test]
fn a_tokenizers_own_truncation_and_padding_are_off() {
    let file = std::fs::read(gsm8k_data::embedded("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(&file).unwrap();
    json["truncation"] =
        json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
    json["padding"] = json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    });
    let own = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let text = "Question: How many apples are there in all?\nAnswer:";
    let cleared = Encoder::new(own, options()).unwrap().prompt(text).unwrap();
    assert_eq!(cleared, encoder(options()).prompt(text).unwrap());
}
