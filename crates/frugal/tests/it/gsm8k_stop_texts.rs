//! Stop texts are found at the token that completes them, however the tokens cut them.

use crate::gsm8k_data;
use dataloading::Tokenizer;
use frugal::tasks::gsm8k::StopTexts;
use proptest::prelude::*;

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<i64> {
    tokenizer.encode(text).unwrap().into_iter().map(i64::from).collect()
}

/// A token for each byte, as a model may generate them.
fn bytes(tokenizer: &Tokenizer, text: &str) -> Vec<i64> {
    let alphabet: Vec<i64> = (0..=255u8)
        .map(|byte| {
            // GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and on, in their order.
            let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let letter = if plain(byte) {
                u32::from(byte)
            } else {
                256 + (0..byte).filter(|below| !plain(*below)).count() as u32
            };
            let letter = char::from_u32(letter).unwrap().to_string();
            i64::from(tokenizer.id(&letter).unwrap())
        })
        .collect();
    text.bytes().map(|byte| alphabet[usize::from(byte)]).collect()
}

/// The number of tokens after which `stop` ended, asked after each.
fn ended_after(stop: &StopTexts<'_>, tokens: &[i64]) -> Option<usize> {
    (1..=tokens.len()).find(|count| stop.ended(&tokens[..*count]).unwrap())
}

#[test]
fn a_stop_text_ends_at_its_last_token() {
    let tokenizer = gsm8k_data::tokenizer();
    let stop = StopTexts::new(&tokenizer, StopTexts::DEFAULT).unwrap();
    for said in [" 7 apples.\n#### 7\n\nQuestion:", "</s>", "… 数 🦀</s>", "x<|im_end|>"] {
        for tokens in [ids(&tokenizer, said), bytes(&tokenizer, said)] {
            assert_eq!(ended_after(&stop, &tokens), Some(tokens.len()), "{said}");
            let going_on = [tokens.clone(), ids(&tokenizer, " and more")].concat();
            assert_eq!(ended_after(&stop, &going_on), Some(tokens.len()), "{said}");
        }
    }
    for said in ["Question", "question:", "Quest ion:", "< /s>", "<|im_end|", "Frage:", "", "数 🦀 數"] {
        for tokens in [ids(&tokenizer, said), bytes(&tokenizer, said)] {
            assert_eq!(ended_after(&stop, &tokens), None, "{said}");
        }
    }
}

#[test]
fn a_stop_text_of_several_bytes_a_character_may_be_cut_anywhere() {
    let tokenizer = gsm8k_data::tokenizer();
    let stop = StopTexts::new(&tokenizer, ["数字"]).unwrap();
    let tokens = bytes(&tokenizer, "a 数学 数字 数");
    assert_eq!(ended_after(&stop, &tokens), Some("a 数学 数字".len()));
}

#[test]
fn special_tokens_are_text_too() {
    let tokenizer = gsm8k_data::tokenizer();
    let stop = StopTexts::new(&tokenizer, ["<|endoftext|>"]).unwrap();
    let tokens = [ids(&tokenizer, "so 7"), vec![0]].concat();
    assert_eq!(ended_after(&stop, &tokens), Some(tokens.len()));
}

#[test]
fn texts_are_cut_at_the_first_stop_text_and_the_end_token() {
    let tokenizer = gsm8k_data::tokenizer();
    let stop = StopTexts::new(&tokenizer, StopTexts::DEFAULT).unwrap();
    assert_eq!(stop.cut("a</s> b Question: c"), "a");
    assert_eq!(stop.cut("a Question: b</s>"), "a ");
    assert_eq!(stop.cut("nothing"), "nothing");
    let tokens = [ids(&tokenizer, "#### 7"), vec![0], ids(&tokenizer, " 8")].concat();
    assert_eq!(stop.text(&tokens, &[0]).unwrap(), "#### 7");
    assert_eq!(stop.text(&tokens, &[]).unwrap(), "#### 7<|endoftext|> 8");
    assert_eq!(stop.text(&[], &[0]).unwrap(), "");
    assert!(stop.ended(&[-100]).unwrap_err().to_string().contains("-100 is not an id"));
    let none = StopTexts::new(&tokenizer, [""; 0]).unwrap();
    assert!(!none.ended(&tokens).unwrap());
    assert!(StopTexts::new(&tokenizer, ["a", ""]).unwrap_err().to_string().contains("empty text"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The window finds what the whole text has, and no sooner.
    #[test]
    fn the_window_sees_what_the_whole_text_has(
        before in "[a-zQ数🦀 <|:\n]{0,30}",
        stop_text in "[a-z数🦀:]{1,6}",
        after in "[a-z数 ]{0,8}",
        by_bytes in any::<bool>(),
    ) {
        let tokenizer = gsm8k_data::tokenizer_once();
        let stop = StopTexts::new(tokenizer, [stop_text.as_str()]).unwrap();
        let said = format!("{before}{stop_text}{after}");
        let tokens = if by_bytes { bytes(tokenizer, &said) } else { ids(tokenizer, &said) };
        let whole = |count: usize| {
            let ids: Vec<u32> = tokens[..count].iter().map(|id| *id as u32).collect();
            tokenizer.decode(&ids).unwrap().contains(&stop_text)
        };
        let expected = (1..=tokens.len()).find(|count| whole(*count));
        prop_assert!(expected.is_some());
        prop_assert_eq!(ended_after(&stop, &tokens), expected);
    }
}
