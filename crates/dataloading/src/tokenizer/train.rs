//! Training a byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909; over bytes as in GPT-2).
//!
//! Texts are split by GPT-2's pattern and counted. Then the pair of neighbouring symbols with the highest count becomes a
//! symbol of its own, until the vocabulary is full. **Ties** go to the pair with the smaller ids. The `tokenizers` crate's
//! own trainer counts in hash maps that are seeded anew by each process and may meet one pair under two entries of equal
//! count, so it does not promise the same file twice; this one does: words are sorted, and every choice is a total order.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet};

use rayon::prelude::*;
use serde_json::json;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

use super::refused;
use crate::error::{Error, Result};

/// The name of the token that ends a text, in trained tokenizers (and GPT-2's).
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The name of the token that pads, in trained tokenizers.
pub const PADDING: &str = "<|padding|>";

/// Texts that are split at a time; bounds the memory.
const CHUNK: usize = 1024;

/// How a tokenizer is trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainConfig {
    /// Ids in all: special tokens, 256 bytes, merges. Fewer when the texts have no more pairs.
    pub vocabulary: usize,
    /// Special tokens; they get the ids from 0.
    pub special_tokens: Vec<String>,
    /// A pair seen less often than this is not merged.
    pub smallest_count: u64,
}

impl Default for TrainConfig {
    /// 4096 ids, `<|endoftext|>` and `<|padding|>`, pairs seen twice.
    fn default() -> Self {
        Self { vocabulary: 4096, special_tokens: vec![END_OF_TEXT.into(), PADDING.into()], smallest_count: 2 }
    }
}

type Pair = (u32, u32);

pub(super) fn train(
    texts: impl IntoIterator<Item = Result<String>>,
    options: &TrainConfig,
) -> Result<String> {
    check(options)?;
    let words = count_words(texts)?;
    if words.is_empty() {
        return Err(Error::Empty {
            from: "texts for a tokenizer".into(),
            reason: "there is nothing to count; give texts that are not empty".into(),
        });
    }
    let mut names = options.special_tokens.clone();
    let bytes: BTreeSet<char> = ByteLevel::alphabet().into_iter().collect();
    let ids: HashMap<char, u32> = bytes.iter().copied().zip(names.len() as u32..).collect();
    names.extend(bytes.iter().map(char::to_string));
    let words = words.into_iter().map(|(word, count)| (word.chars().map(|c| ids[&c]).collect(), count));
    let merges = merge(words.collect(), &mut names, options);
    // A symbol that comes about a second way can bring a merged pair back; the pair keeps its first rank.
    let mut seen = HashSet::new();
    let merges: Vec<[String; 2]> = merges
        .into_iter()
        .filter(|pair| seen.insert(*pair))
        .map(|(a, b)| [names[a as usize].clone(), names[b as usize].clone()])
        .collect();
    Ok(render(&names, &merges, options.special_tokens.len()))
}

fn check(options: &TrainConfig) -> Result<()> {
    let wrong = |reason| Err(Error::Config { what: "tokenizer training", reason });
    let special: BTreeSet<&String> = options.special_tokens.iter().collect();
    if special.len() != options.special_tokens.len() || special.iter().any(|name| name.chars().count() < 2) {
        return wrong(format!(
            "special tokens must differ and have two characters or more, got {:?}",
            options.special_tokens
        ));
    }
    let least = 256 + special.len();
    if options.vocabulary < least || options.vocabulary > u32::MAX as usize {
        return wrong(format!(
            "a vocabulary of {} cannot hold the 256 bytes and {} special tokens; ask for {least} or more",
            options.vocabulary,
            special.len()
        ));
    }
    Ok(())
}

/// Words as the byte-level alphabet writes them, and how often each is there.
fn count_words(texts: impl IntoIterator<Item = Result<String>>) -> Result<BTreeMap<String, u64>> {
    let splitter = ByteLevel::new(false, true, true);
    let count = |text: &String| -> Result<HashMap<String, u64>> {
        let mut pieces = PreTokenizedString::from(text.as_str());
        splitter.pre_tokenize(&mut pieces).map_err(refused)?;
        let mut counts = HashMap::new();
        for (word, _, _) in pieces.get_splits(OffsetReferential::Original, OffsetType::Byte) {
            *counts.entry(word.to_owned()).or_insert(0) += 1;
        }
        Ok(counts)
    };
    let mut words = BTreeMap::new();
    let mut texts = texts.into_iter();
    loop {
        let chunk = texts.by_ref().take(CHUNK).collect::<Result<Vec<String>>>()?;
        if chunk.is_empty() {
            return Ok(words);
        }
        for counts in chunk.par_iter().map(count).collect::<Result<Vec<_>>>()? {
            for (word, count) in counts {
                *words.entry(word).or_insert(0) += count;
            }
        }
    }
}

/// Merges until the vocabulary is full; appends the new symbols' names, and returns the pairs in order.
fn merge(mut words: Vec<(Vec<u32>, u64)>, names: &mut Vec<String>, options: &TrainConfig) -> Vec<Pair> {
    let mut counts: HashMap<Pair, u64> = HashMap::new();
    let mut places: HashMap<Pair, BTreeSet<u32>> = HashMap::new();
    for (place, (word, count)) in words.iter().enumerate() {
        for pair in word.windows(2).map(|pair| (pair[0], pair[1])) {
            *counts.entry(pair).or_default() += count;
            places.entry(pair).or_default().insert(place as u32);
        }
    }
    // Two ways to one string (`a` + `bc`, `ab` + `c`) are one token.
    let mut taken: HashMap<String, u32> = names.iter().cloned().zip(0..).collect();
    // An entry is stale when the pair's count has changed since; every change pushes a new one.
    let mut queue: BinaryHeap<(u64, Reverse<Pair>)> =
        counts.iter().map(|(pair, count)| (*count, Reverse(*pair))).collect();
    let mut merges = Vec::new();
    while names.len() < options.vocabulary {
        let Some((count, Reverse(pair))) = queue.pop() else { break };
        if counts.get(&pair) != Some(&count) {
            continue;
        }
        if count < options.smallest_count.max(1) {
            break;
        }
        let name = format!("{}{}", names[pair.0 as usize], names[pair.1 as usize]);
        let new = *taken.entry(name).or_insert_with_key(|name| {
            names.push(name.clone());
            names.len() as u32 - 1
        });
        merges.push(pair);
        let mut changed = BTreeSet::new();
        for place in places.remove(&pair).unwrap_or_default() {
            let (word, times) = &mut words[place as usize];
            for old in word.windows(2).map(|pair| (pair[0], pair[1])) {
                if let Some(count) = counts.get_mut(&old) {
                    *count -= *times;
                }
                changed.insert(old);
            }
            replace(word, pair, new);
            for fresh in word.windows(2).map(|pair| (pair[0], pair[1])) {
                *counts.entry(fresh).or_default() += *times;
                places.entry(fresh).or_default().insert(place);
                changed.insert(fresh);
            }
        }
        counts.remove(&pair);
        let changed = changed.into_iter().filter_map(|pair| Some((*counts.get(&pair)?, Reverse(pair))));
        queue.extend(changed.filter(|(count, _)| *count > 0));
    }
    merges
}

/// Each `pair` in `word`, from the left, becomes `new`.
fn replace(word: &mut Vec<u32>, pair: Pair, new: u32) {
    let (mut from, mut to) = (0, 0);
    while from < word.len() {
        let is_pair = word[from] == pair.0 && word.get(from + 1) == Some(&pair.1);
        word[to] = if is_pair { new } else { word[from] };
        from += if is_pair { 2 } else { 1 };
        to += 1;
    }
    word.truncate(to);
}

/// The `tokenizer.json`, written here so that its bytes depend on nothing but the result.
fn render(names: &[String], merges: &[[String; 2]], special: usize) -> String {
    let added: Vec<_> = (0..special)
        .map(|id| {
            json!({
                "id": id, "content": names[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let vocabulary: serde_json::Map<_, _> =
        names.iter().zip(0u32..).map(|(name, id)| (name.clone(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges,
        },
    });
    format!("{tokenizer:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same algorithm, counting everything anew at each step.
    fn naive(mut words: Vec<(Vec<u32>, u64)>, names: &mut Vec<String>, options: &TrainConfig) -> Vec<Pair> {
        let mut merges = Vec::new();
        while names.len() < options.vocabulary {
            let mut counts: BTreeMap<Pair, u64> = BTreeMap::new();
            for (word, count) in &words {
                word.windows(2).for_each(|pair| *counts.entry((pair[0], pair[1])).or_default() += count);
            }
            let best = counts.into_iter().max_by_key(|(pair, count)| (*count, Reverse(*pair)));
            let Some((pair, count)) = best else { break };
            if count < options.smallest_count {
                break;
            }
            let name = format!("{}{}", names[pair.0 as usize], names[pair.1 as usize]);
            let new = names.iter().position(|n| *n == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            });
            merges.push(pair);
            words.iter_mut().for_each(|(word, _)| replace(word, pair, new as u32));
        }
        merges
    }

    proptest::proptest! {
        #[test]
        fn merges_match_recounting(
            words in proptest::collection::vec((proptest::collection::vec(0u32..4, 1..12), 1u64..4), 1..12)
        ) {
            let names: Vec<String> = ["a", "b", "c", "d"].map(String::from).to_vec();
            let options = TrainConfig { vocabulary: 20, ..TrainConfig::default() };
            let (mut ours, mut theirs) = (names.clone(), names);
            let expected = naive(words.clone(), &mut theirs, &options);
            proptest::prop_assert_eq!(merge(words, &mut ours, &options), expected);
            proptest::prop_assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn a_tie_goes_to_the_smaller_ids() {
        let mut names: Vec<String> = ["a", "b", "c"].map(String::from).to_vec();
        let options = TrainConfig { vocabulary: 5, ..TrainConfig::default() };
        let words = vec![(vec![2, 1], 3), (vec![0, 1], 3), (vec![1, 2], 3)];
        assert_eq!(merge(words, &mut names, &options), [(0, 1), (1, 2)]);
        assert_eq!(names[3..], ["ab", "bc"]);
    }
}
