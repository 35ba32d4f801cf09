//! The parts of the appendix, one for each assignment.

use serde::Deserialize;

use super::view::file_name;

/// A part of the report: an assignment's questions with their answers, then sections.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its name, and its file `appendix/<name>.html`.
    #[serde(deserialize_with = "file_name")]
    pub name: String,
    /// Heading.
    pub title: String,
    /// The assignment's question in a sentence or two, and formulas that belong to the whole part, in Markdown.
    pub about: String,
    /// The experiments and comparisons whose sections it has, in the order of the page. Each belongs to one part; those
    /// that no part names stand in the last one.
    #[serde(default)]
    pub sections: Vec<String>,
    /// `[[part.row]]`: the assignment's questions and tasks.
    #[serde(default, rename = "row")]
    pub rows: Vec<Row>,
}

/// A question or task of an assignment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The question or task, in Markdown.
    pub asks: String,
    /// An answer without figures, such as a formula or where the code is, in Markdown.
    #[serde(default)]
    pub says: String,
    /// The files that have the code and its test, relative to the checkout.
    #[serde(default)]
    pub code: Vec<String>,
    /// The experiments and comparisons whose sections answer it.
    #[serde(default)]
    pub sections: Vec<String>,
    /// Why the answer is not the assignment's: of a smaller size, of another device, of too few runs. Missing where it is.
    #[serde(default)]
    pub short: Option<String>,
    /// Whether the question is the project's own and not the assignment's.
    #[serde(default)]
    pub own: bool,
}
