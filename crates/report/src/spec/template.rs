//! The sentence of a finding, with placeholders for computed quantities.

use serde::Deserialize;

/// A sentence with placeholders for computed quantities.
///
/// | written | becomes |
/// |---|---|
/// | `{per}` | the group's case: `batch 8, SaveOne` |
/// | `{level}` | the value of that case key in the group, or in the `of` filter |
/// | `{of:peak_bytes}` | the value: `1.25 GiB` |
/// | `{against:peak_bytes}` | the baseline value |
/// | `{ratio:peak_bytes}` | `of / against`: `0.760` |
/// | `{less:peak_bytes}` | `24.0 % less`, or `… more`, or `the same` |
/// | `{more:peak_bytes}` | the same words, for sentences that expect more |
/// | `{{`, `}}` | a brace |
///
/// Where a change is not larger than both spreads together, the sentence ends with `(within the spread: backward)`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template(pub(crate) Vec<Piece>);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Piece {
    Text(String),
    Key(String),
    Quantity(Quantity, String),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Quantity {
    Of,
    Against,
    Ratio,
    Change,
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(['{', '}']) {
            let brace = &rest[at..=at];
            plain.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err("the text has a `}` without its `{`; write `}}` for a brace".into());
            }
            let Some(end) = rest.find('}') else {
                return Err("the text has a `{` without its `}`; write `{{` for a brace".into());
            };
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(Piece::parse(&rest[..end])?);
            rest = &rest[end + 1..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self(pieces))
    }
}

impl Piece {
    fn parse(inside: &str) -> Result<Self, String> {
        let Some((quantity, metric)) = inside.split_once(':') else {
            return match inside {
                "" => Err("the text has an empty `{}`; name a case key or a quantity".into()),
                key => Ok(Self::Key(key.into())),
            };
        };
        let quantity = match quantity {
            "of" => Quantity::Of,
            "against" => Quantity::Against,
            "ratio" => Quantity::Ratio,
            "less" | "more" => Quantity::Change,
            other => {
                return Err(format!(
                    "the text asks for the unknown quantity `{other}`; known: of, against, ratio, less, more"
                ));
            }
        };
        if metric.is_empty() {
            return Err(format!(
                "the text has `{{{inside}}}` without a metric; write `{{{inside}backward_seconds}}`"
            ));
        }
        Ok(Self::Quantity(quantity, metric.into()))
    }
}

impl Template {
    /// The first quantity that is a relation of two values, as it is written.
    pub(super) fn first_that_needs_against(&self) -> Option<String> {
        self.0.iter().find_map(|piece| match piece {
            Piece::Quantity(Quantity::Against, metric) => Some(format!("`{{against:{metric}}}`")),
            Piece::Quantity(Quantity::Ratio, metric) => Some(format!("`{{ratio:{metric}}}`")),
            Piece::Quantity(Quantity::Change, metric) => {
                Some(format!("`{{less:{metric}}}` or `{{more:{metric}}}`"))
            }
            _ => None,
        })
    }
}
