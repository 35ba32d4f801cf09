//! The one page: a first screen and an article for each assignment, from records.
//!
//! An article is a file of figures, tables and sentences with placeholders ([`crate::spec::Article`]). What a record does not fill is
//! left out and listed in [`FrontPage::problems`], which the project's own records leave empty: a question without a figure of its
//! size is in the article's list of what is not measured, with the reason that its row of the part gives.

mod exhibit;
mod figure;
mod grid;
mod machines;
mod sentence;

use crate::plot::escape;
use crate::prose;
use crate::record::Record;
use crate::spec::{Article, Front, Part, Row, Specs};
pub use machines::Machines;

/// The page's content.
#[derive(Clone, Debug, Default)]
pub struct FrontPage {
    /// Its elements, within `<main>`.
    pub html: String,
    /// Anchor and name of each article.
    pub contents: Vec<(String, String)>,
    /// What no record fills.
    pub problems: Vec<String>,
    /// The first table's figures of the first machine: technique and quantity, and the ratio with the peer's name.
    pub headlines: Vec<(String, String)>,
}

/// Builds the page; `None` where no file gives its front.
pub fn build(specs: &Specs, records: &[&Record]) -> Option<FrontPage> {
    let front = specs.front.as_ref()?;
    let mut builder =
        Builder { front, specs, machines: Machines::new(&front.machines, records), problems: Vec::new() };
    let mut html = builder.opening(specs);
    for article in &specs.articles {
        html += &builder.article(article, specs.parts.iter().find(|part| part.name == article.part));
    }
    html += &builder.colophon(specs);
    let contents =
        specs.articles.iter().map(|article| (article.name.clone(), article.title.clone())).collect();
    let headlines = grid::headlines(&builder.machines, &front.table);
    Some(FrontPage { html, contents, problems: builder.problems, headlines })
}

/// The page while it is written.
struct Builder<'a> {
    front: &'a Front,
    specs: &'a Specs,
    machines: Machines,
    problems: Vec<String>,
}

impl Builder<'_> {
    fn opening(&mut self, specs: &Specs) -> String {
        let mut html = format!(
            "<header class=\"opening\" id=\"top\">\n<h1>Frugal</h1>\n<div class=\"lead\">{}</div>\n",
            prose::html(&self.front.about)
        );
        html += &self.grid("the first table", &self.front.table.clone());
        html += &format!("<div class=\"reading\">{}</div>\n", prose::html(&self.front.reading));
        html += &self.figure("the first figure", &self.front.figure.clone());
        html + &counts(specs) + "</header>\n"
    }

    fn article(&mut self, article: &Article, part: Option<&Part>) -> String {
        let place = |what: &str| format!("article {}: {what}", article.name);
        let name = escape(&article.name);
        let mut html = format!(
            "<article id=\"{name}\">\n<h2>{}</h2>\n<div class=\"question\">{}</div>\n{}",
            escape(&article.title),
            prose::html(&article.question),
            prose::html(&article.idea)
        );
        for exhibit in &article.exhibits {
            html += &self.exhibit(&place(&exhibit.title), exhibit, &article.values);
        }
        for (heading, sentences) in
            [("What follows", &article.follows), ("What surprised", &article.surprised)]
        {
            let items: String = sentences
                .iter()
                .filter_map(|says| self.says(&place(heading), says, &article.values))
                .map(|text| format!("<li>{}</li>\n", prose::inline(&text)))
                .collect();
            if !items.is_empty() {
                html += &format!("<h3>{heading}</h3>\n<ul>\n{items}</ul>\n");
            }
        }
        html += &part.map(not_measured).unwrap_or_default();
        html + &format!(
            "<p class=\"small\">Everything else: <a href=\"appendix/{0}.html\">appendix “{1}”</a>.</p>\n</article>\n",
            escape(&article.part),
            escape(part.map_or("", |part| &part.title))
        )
    }

    fn colophon(&mut self, specs: &Specs) -> String {
        let several = self.machines.several_revisions();
        match (&self.front.several_revisions, several) {
            (None, true) => {
                self.problems.push("the records of a machine have several revisions, without a reason".into())
            }
            (Some(_), false) => self.problems.push("each machine has one revision; remove the reason".into()),
            _ => {}
        }
        let link = |part: &Part| {
            format!("<li><a href=\"appendix/{}.html\">{}</a></li>\n", escape(&part.name), escape(&part.title))
        };
        format!(
            "<footer>\n<h2 id=\"appendix\">Machines and appendix</h2>\n{}{}<ul class=\"parts\">\n{}</ul>\n</footer>\n",
            self.machines.table(),
            self.front.several_revisions.as_ref().map(|why| prose::html(why)).unwrap_or_default(),
            specs.parts.iter().map(link).collect::<String>()
        )
    }
}

/// How many of the assignments' questions have an answer of their size.
fn counts(specs: &Specs) -> String {
    let rows: Vec<&Row> = specs.parts.iter().flat_map(|part| &part.rows).filter(|row| !row.own).collect();
    let short = rows.iter().filter(|row| row.short.is_some()).count();
    format!(
        "<p>The assignments ask {} questions. {} are answered as asked; {short} with less, which each article lists.</p>\n",
        rows.len(),
        rows.len() - short
    )
}

/// The questions of a part whose answer is less than was asked.
fn not_measured(part: &Part) -> String {
    let item = |row: &Row| Some(format!("<li>{}</li>\n", prose::inline(row.short.as_ref()?)));
    let items: String = part.rows.iter().filter_map(item).collect();
    match items.is_empty() {
        true => String::new(),
        false => format!("<h3>What is not measured</h3>\n<ul class=\"gaps\">\n{items}</ul>\n"),
    }
}
