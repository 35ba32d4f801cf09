//! The tokens of a text, each with its part of the text.

use std::ops::Range;

/// Token ids, and the bytes of the text that each token is of.
///
/// Which tokens belong to a part of a text follows from these spans, so a text is encoded once, as a whole, as inference encodes it:
/// tokenizers mark the start of a text, merge across the borders of its parts, and give some special tokens the blanks beside them.
///
/// ```
/// use dataloading::tokenizer::{Tokenizer, TrainConfig};
///
/// let options = TrainConfig { vocabulary: 270, ..TrainConfig::default() };
/// let tokenizer = Tokenizer::train(["the cat and the hat"].map(|text| Ok(text.to_owned())), &options)?;
/// let encoded = tokenizer.encode_with_spans("the hat")?;
/// assert_eq!(encoded.ids, tokenizer.encode("the hat")?);
/// let is_within = encoded.is_within(&[4..7]);
/// assert!(!is_within[0] && is_within[is_within.len() - 1]);
/// # Ok::<(), dataloading::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<u32>,
    /// The bytes of the text that each id covers. The tokens of one character (byte fallback) have the same span, and a
    /// separate token that marks a start has the span of the first character after it.
    pub spans: Vec<Range<usize>>,
}

impl Encoded {
    /// Creates it of spans as the `tokenizers` crate gives them. A post-processor may trim blanks off a span, which leaves nothing of
    /// a token of blanks: such a token gets the text between its neighbours.
    pub(super) fn new(ids: Vec<u32>, offsets: &[(usize, usize)]) -> Self {
        let mut spans: Vec<Range<usize>> = Vec::with_capacity(offsets.len());
        for &(start, end) in offsets {
            let before = spans.last().map_or(0, |span| span.end);
            spans.push(if start == end && before < start { before..end } else { start..end });
        }
        Self { ids, spans }
    }

    /// Removes the first tokens, and the first bytes of the text.
    pub(super) fn cut_start(&mut self, tokens: usize, bytes: usize) {
        self.ids.drain(..tokens);
        self.spans.drain(..tokens);
        for span in &mut self.spans {
            *span = span.start.saturating_sub(bytes)..span.end.saturating_sub(bytes);
        }
    }

    /// Appends the tokens of text that follows at a byte.
    pub(super) fn append(&mut self, at: usize, next: Self) {
        self.ids.extend(next.ids);
        self.spans.extend(next.spans.into_iter().map(|span| at + span.start..at + span.end));
    }

    /// Returns for each token whether it is of one of these parts of the text, which are in order and do not overlap.
    ///
    /// A token that lies across a border belongs to the part, as in the mask of transformers' `return_assistant_tokens_mask`. A token
    /// of no text is with the token after it.
    pub fn is_within(&self, parts: &[Range<usize>]) -> Vec<bool> {
        let overlaps = |span: &Range<usize>| {
            let next = parts.partition_point(|part| part.end <= span.start);
            parts.get(next).is_some_and(|part| part.start < span.end)
        };
        let mut within: Vec<bool> = self.spans.iter().map(overlaps).collect();
        for at in (0..within.len().saturating_sub(1)).rev() {
            if self.spans[at].is_empty() {
                within[at] = within[at + 1];
            }
        }
        within
    }

    /// Returns whether a token joins the text before one of these parts with the part's first character.
    pub fn joins_a_start_of(&self, parts: &[Range<usize>]) -> bool {
        parts
            .iter()
            .any(|part| self.spans.iter().any(|span| span.start < part.start && part.start < span.end))
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    fn encoded(offsets: &[(usize, usize)]) -> Encoded {
        Encoded::new((0..offsets.len() as u32).collect(), offsets)
    }

    #[test]
    fn a_token_across_a_border_belongs_to_the_part() {
        let text = encoded(&[(0, 4), (4, 6), (6, 7), (6, 7), (7, 9)]);
        assert_eq!(text.is_within(from_ref(&(5..7))), [false, true, true, true, false]);
        assert!(text.joins_a_start_of(from_ref(&(5..7))) && !text.joins_a_start_of(&[4..5, 7..9]));
        assert_eq!(text.is_within(&[0..1, 8..9]), [true, false, false, false, true]);
        assert_eq!(text.is_within(&[]), [false; 5]);
    }

    #[test]
    fn tokens_of_trimmed_blanks_get_their_text_back() {
        // "a", "\n" trimmed to nothing, "b".
        let text = encoded(&[(0, 1), (2, 2), (2, 3)]);
        assert_eq!(text.spans, [0..1, 1..2, 2..3]);
        assert_eq!(text.is_within(from_ref(&(1..2))), [false, true, false]);
        // A token of no text at all.
        assert_eq!(encoded(&[(0, 1), (1, 1), (1, 2)]).is_within(from_ref(&(1..2))), [false, true, true]);
    }
}
