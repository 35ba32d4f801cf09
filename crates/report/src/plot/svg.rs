//! SVG text, the style that all plots share, and how wide a text is.

use std::fmt::{Display, Write};

/// Okabe and Ito's colours, darkened for a light background and lightened for a dark one until each has a contrast of
/// three to one at least. More series than colours start again, with another shape of mark.
const COLOURS: [(&str, &str); 8] = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff9a56"),
    ("#00805e", "#2cc79b"),
    ("#a8487d", "#e59cc5"),
    ("#8a6a00", "#f0c541"),
    ("#5b4bb7", "#aaa0f5"),
    ("#3f7d8c", "#8fd3df"),
    ("#666666", "#b5b5b5"),
];

/// Size of the text in a plot, in its own units.
pub(super) const FONT: f64 = 12.0;

/// An SVG document that is being written.
pub(super) struct Svg {
    body: String,
}

/// Which end of a text is at its position.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    pub(super) fn new() -> Self {
        Self { body: String::new() }
    }

    /// The document around what was written, with a name for screen readers.
    pub(super) fn finish(self, title: &str, width: f64, height: f64) -> String {
        let (w, h, title) = (short(width), short(height), escape(title));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"frugal-plot\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" \
             height=\"{h}\" role=\"img\" aria-label=\"{title}\">\n{}{}</svg>\n",
            style(),
            self.body
        )
    }

    /// Makes the class `inside` one for texts on a series' colour: of the background's lightness, as the colours are of the
    /// text's.
    pub(super) fn style_texts_inside(&mut self) {
        self.body += "<style>.frugal-plot text.inside{fill:#fff;font-size:10px}\
                      @media screen and (prefers-color-scheme:dark){.frugal-plot text.inside{fill:#15181c}}</style>\n";
    }

    pub(super) fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let (x1, y1, x2, y2) = (short(x1), short(y1), short(x2), short(y2));
        let _ =
            writeln!(self.body, "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
    }

    pub(super) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<_> = points.iter().map(|&(x, y)| format!("{},{}", short(x), short(y))).collect();
        let _ = writeln!(self.body, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    }

    /// A rectangle that shows `hover` under the pointer.
    pub(super) fn rect(&mut self, class: &str, (x, y): (f64, f64), (w, h): (f64, f64), hover: &str) {
        let (x, y, w, h) = (short(x), short(y), short(w), short(h));
        let _ = writeln!(
            self.body,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"><title>{}</title></rect>",
            escape(hover)
        );
    }

    pub(super) fn text(&mut self, class: &str, anchor: Anchor, (x, y): (f64, f64), text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let (x, y) = (short(x), short(y));
        let _ = writeln!(self.body, "<text{class}{anchor} x=\"{x}\" y=\"{y}\">{}</text>", escape(text));
    }

    /// The mark of a series at a point, which shows `hover` under the pointer.
    pub(super) fn mark(&mut self, series: usize, hollow: bool, (x, y): (f64, f64), hover: &str) {
        let r = 4.5;
        let path = match (series + series / COLOURS.len()) % 6 {
            0 => format!(
                "M{} {}a{r} {r} 0 1 0 {} 0a{r} {r} 0 1 0 -{} 0z",
                short(x - r),
                short(y),
                2.0 * r,
                2.0 * r
            ),
            1 => polygon(&[(x - 4.0, y - 4.0), (x + 4.0, y - 4.0), (x + 4.0, y + 4.0), (x - 4.0, y + 4.0)]),
            2 => polygon(&[(x, y - 5.5), (x + 5.0, y + 3.8), (x - 5.0, y + 3.8)]),
            3 => polygon(&[(x, y - 5.8), (x + 5.8, y), (x, y + 5.8), (x - 5.8, y)]),
            4 => polygon(&[(x, y + 5.5), (x + 5.0, y - 3.8), (x - 5.0, y - 3.8)]),
            _ => {
                let (a, b) = (1.8, 5.2);
                let corner = |dx: f64, dy: f64| (x + dx, y + dy);
                polygon(&[
                    corner(-a, -b),
                    corner(a, -b),
                    corner(a, -a),
                    corner(b, -a),
                    corner(b, a),
                    corner(a, a),
                    corner(a, b),
                    corner(-a, b),
                    corner(-a, a),
                    corner(-b, a),
                    corner(-b, -a),
                    corner(-a, -a),
                ])
            }
        };
        let class = if hollow { format!("{} hollow", stroke(series)) } else { fill(series) };
        let title =
            if hover.is_empty() { String::new() } else { format!("<title>{}</title>", escape(hover)) };
        let _ = writeln!(self.body, "<path class=\"mark {class}\" d=\"{path}\">{title}</path>");
    }
}

fn polygon(corners: &[(f64, f64)]) -> String {
    let corners: Vec<_> = corners.iter().map(|&(x, y)| format!("{} {}", short(x), short(y))).collect();
    format!("M{}z", corners.join("L"))
}

/// The class that fills with a series' colour.
pub(super) fn fill(series: usize) -> String {
    format!("f{}", series % COLOURS.len())
}

/// The class that draws lines in a series' colour.
pub(super) fn stroke(series: usize) -> String {
    format!("k{}", series % COLOURS.len())
}

/// Class names stand under `.frugal-plot`, so that inlined in a page they touch nothing else. On paper the light
/// colours are used. Texts have an outline in the page's colour, so that no line crosses them.
pub(super) fn style() -> String {
    format!("<style>{}</style>\n", rules())
}

pub(super) fn rules() -> String {
    let rules = |pick: fn(&(&'static str, &'static str)) -> &'static str| {
        let rule = |(i, c): (usize, &(&'static str, &'static str))| {
            let colour = pick(c);
            format!(
                ".frugal-plot .f{i}{{fill:{colour}}}.frugal-plot .k{i}{{stroke:{colour}}}.frugal-plot .t{i}{{fill:{colour}}}"
            )
        };
        COLOURS.iter().enumerate().map(rule).collect::<String>()
    };
    format!(
        ".frugal-plot{{color:#1f2328;font:{FONT}px system-ui,-apple-system,\"Segoe UI\",\"Liberation Sans\",\
         Arial,sans-serif}}.frugal-plot text{{fill:currentColor;stroke:#fff;stroke-width:3px;stroke-linejoin:round;\
         paint-order:stroke}}.frugal-plot text.inside{{stroke:none}}.frugal-plot .soft{{fill-opacity:.72}}\
         .frugal-plot .head{{font-weight:600}}.frugal-plot .grid{{stroke:currentColor;stroke-opacity:.13}}\
         .frugal-plot .base{{stroke:currentColor;stroke-opacity:.55}}.frugal-plot polyline{{fill:none;stroke-width:2;\
         stroke-linejoin:round}}.frugal-plot .front{{stroke:currentColor;stroke-opacity:.6;stroke-width:1.5;\
         stroke-dasharray:5 3}}.frugal-plot .one{{stroke:currentColor;stroke-opacity:.7;\
         stroke-dasharray:3 3}}.frugal-plot .interval{{stroke:currentColor;stroke-width:1.6}}.frugal-plot .thin\
         {{stroke-width:1.4}}.frugal-plot .whisker{{stroke-width:1.2;stroke-opacity:.65}}.frugal-plot .hollow\
         {{fill:none;stroke-width:1.8}}{}\n@media screen and (prefers-color-scheme:dark){{.frugal-plot{{color:#e4e7eb}}\
         .frugal-plot text{{stroke:#12161b}}.frugal-plot text.inside{{stroke:none}}\
         {}}}",
        rules(|c| c.0),
        rules(|c| c.1),
    )
}

/// A coordinate to a tenth, without needless digits.
fn short(value: f64) -> impl Display {
    let tenths = (value * 10.0).round() / 10.0;
    // Adding zero turns -0 into 0.
    tenths + 0.0
}

/// Returns a text with the characters replaced that XML and HTML give a meaning. Control characters, which XML forbids, become
/// spaces.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

/// The text, or as much of its start as is not wider than `room`, with an ellipsis.
pub(super) fn clip(text: &str, room: f64) -> String {
    if width(text) <= room {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        kept.push(c);
        if width(&kept) > room - FONT {
            kept.pop();
            break;
        }
    }
    kept.trim_end().to_owned() + "…"
}

/// About how wide a text is at the size of a plot's text. Which face a reader has is not known, so this is the width
/// in a wide one (DejaVu Sans): a legend with room to spare is better than one that runs together.
pub(super) fn width(text: &str) -> f64 {
    let em = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '|' | '!' | '\'' => 0.32,
        ' ' | 't' | 'f' | 'r' | '(' | ')' | '[' | ']' | '/' | '-' => 0.4,
        'm' | 'w' | 'M' | 'W' | '@' | '%' | '—' => 0.93,
        c if c.is_ascii_uppercase() => 0.7,
        c if c.is_ascii() => 0.63,
        '–' | '·' | '×' | '±' | 'µ' => 0.8,
        c if (c as u32) < 0x2000 => 0.68,
        _ => 1.0,
    };
    text.chars().map(em).sum::<f64>() * FONT
}
