//! Figures of the page.

use super::Builder;
use super::sentence::ratio;
use crate::estimate::{Certainty, Estimate};
use crate::measurements::Measurements;
use crate::plot::panels::{self, Bar, Dot, Drawing, Line, Panel, Words};
use crate::plot::{self, escape};
use crate::prose;
use crate::record::Record;
use crate::spec::{self, Figure, FigureKind, Item, Measure};
use crate::unit;

impl Builder<'_> {
    pub(super) fn figure(&mut self, place: &str, figure: &Figure) -> String {
        let place = format!("{place}, figure");
        let drawing = match figure.kind {
            FigureKind::Bars => self.bars(&place, figure),
            FigureKind::Pareto => self.pareto(&place, figure),
            FigureKind::Lines => self.lines(&place, figure),
            FigureKind::Plot => self.plot(&place, figure),
        };
        let Some(Drawing { wide, narrow }) = drawing else { return String::new() };
        // The drawings are our own writer's, which has escaped every text in them.
        format!(
            "<figure>\n<div class=\"on-wide\">{}</div>\n<div class=\"on-narrow\">{}</div>\n<figcaption>{}</figcaption>\n</figure>\n",
            plot::without_style(&wide),
            plot::without_style(&narrow),
            prose::inline(&figure.caption)
        )
    }

    fn colour(&mut self, place: &str, item: &Item) -> usize {
        let colour = self.front.colours.get(&item.thing).copied();
        if colour.is_none() {
            self.problems.push(format!("{place}: \"{}\" has no colour on this page", item.thing));
        }
        colour.unwrap_or_default()
    }

    /// The values of every item in every panel; a panel without any is a problem.
    fn marks(&mut self, place: &str, figure: &Figure) -> Vec<(usize, usize, Measure, Estimate)> {
        let mut all = Vec::new();
        for (p, panel) in figure.panels.iter().enumerate() {
            let before = all.len();
            for (i, item) in figure.items.iter().enumerate() {
                let measure = figure.all.and(&item.all).and(&panel.all);
                let here = item.machines.is_empty()
                    || measure.machine.as_ref().is_some_and(|name| item.machines.contains(name));
                if !here {
                    continue;
                }
                match self.machines.value(&measure) {
                    Ok(value) => all.push((p, i, measure, value)),
                    Err(why) if why.contains("name one") => {
                        self.problems.push(format!("{place}, {}: {why}", item.label))
                    }
                    Err(_) => {}
                }
            }
            if all.len() == before {
                self.problems.push(format!("{place}: the panel \"{}\" has no value", panel.title));
            }
        }
        all
    }

    fn bars(&mut self, place: &str, figure: &Figure) -> Option<Drawing> {
        let marks = self.marks(place, figure);
        let is_ratio = marks.iter().all(|(.., value)| value.unit == "ratio");
        let names: Vec<(String, usize)> =
            figure.items.iter().map(|item| (item.label.clone(), self.colour(place, item))).collect();
        let panel = |p: usize| {
            let mine = || marks.iter().filter(move |(panel, ..)| *panel == p);
            let most = mine().map(|(.., value)| value.value).fold(0.0, f64::max);
            let unit = mine().next().map(|(.., value)| value.unit.clone()).unwrap_or_default();
            let multiple = unit::multiple(most, &unit);
            let bar = |(_, row, _, value): &(usize, usize, Measure, Estimate)| {
                let shown = value.value / multiple.divisor;
                let interval =
                    interval(value).map(|(low, high)| (low / multiple.divisor, high / multiple.divisor));
                let once = if value.certainty == Certainty::Single { " (one run)" } else { "" };
                Bar { row: *row, value: shown, interval, text: format!("{}{once}", ratio(shown)) }
            };
            let title = match multiple.symbol.as_str() {
                "" => figure.panels[p].title.clone(),
                symbol => format!("{}, {symbol}", figure.panels[p].title),
            };
            Panel { title, marks: mine().map(bar).collect() }
        };
        let all: Vec<Panel<Bar>> = (0..figure.panels.len()).map(panel).collect();
        let words = Words { title: &figure.caption, x: &figure.x_title, y: "" };
        (!marks.is_empty()).then(|| panels::bars(&words, &names, &all, is_ratio))
    }

    fn pareto(&mut self, place: &str, figure: &Figure) -> Option<Drawing> {
        let marks = self.marks(place, figure);
        let colours: Vec<usize> = figure.items.iter().map(|item| self.colour(place, item)).collect();
        let dot = |(p, i, measure, y): &(usize, usize, Measure, Estimate)| {
            let item = &figure.items[*i];
            let x =
                item.x.clone().or_else(|| figure.panels[*p].x.clone()).unwrap_or_else(|| figure.x.clone());
            let x = self.machines.value(&Measure { metric: Some(x), ..measure.clone() }).ok()?;
            let rate = self.machines.value(&Measure { against: None, ..measure.clone() });
            let y = if rate.is_ok_and(|value| value.unit.ends_with("/s")) {
                y.clone().inverse()
            } else {
                y.clone()
            };
            let interval = interval(&y);
            Some((
                *p,
                Dot { label: item.label.clone(), colour: colours[*i], x: x.value, y: y.value, interval },
            ))
        };
        let mut dots: Vec<(usize, Dot)> = marks.iter().filter_map(dot).collect();
        let mut all = Vec::new();
        for (p, panel) in figure.panels.iter().enumerate() {
            let (mine, rest): (Vec<_>, Vec<_>) = dots.into_iter().partition(|(panel, _)| *panel == p);
            dots = rest;
            all.push(Panel {
                title: panel.title.clone(),
                marks: mine.into_iter().map(|(_, dot)| dot).collect(),
            });
        }
        let words = Words { title: &figure.caption, x: &figure.x_title, y: &figure.y_title };
        (!marks.is_empty()).then(|| panels::pareto(&words, &all))
    }

    fn lines(&mut self, place: &str, figure: &Figure) -> Option<Drawing> {
        let mut all = Vec::new();
        for panel in &figure.panels {
            let mut marks = Vec::new();
            for item in &figure.items {
                let measure = figure.all.and(&item.all).and(&panel.all);
                if !item.machines.is_empty()
                    && !measure.machine.as_ref().is_some_and(|name| item.machines.contains(name))
                {
                    continue;
                }
                match self.machines.line(&measure, &figure.x) {
                    Ok(points) => marks.push(Line {
                        label: item.label.clone(),
                        colour: self.colour(place, item),
                        points,
                    }),
                    Err(why) => {
                        self.problems.push(format!("{place}, {}, {}: {why}", panel.title, item.label))
                    }
                }
            }
            all.push((panel, marks));
        }
        let largest = |marks: &[Line]| {
            marks.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max)
        };
        let of_all = all.iter().map(|(_, marks)| largest(marks)).fold(0.0, f64::max);
        let (mut panels, mut symbols) = (Vec::new(), Vec::new());
        for (panel, mut marks) in all {
            let most = if figure.shared { of_all } else { largest(&marks) };
            let multiple = unit::multiple(most, &self.unit_of(figure, panel));
            for point in marks.iter_mut().flat_map(|line| &mut line.points) {
                point.1 /= multiple.divisor;
            }
            panels.push(Panel { title: panel.title.clone(), marks });
            symbols.push(multiple.symbol);
        }
        // The unit stands at the axis where all panels have one, else in each panel's heading.
        let with_unit = |text: &str, symbol: &str| match symbol {
            "" => text.to_owned(),
            symbol => format!("{text}, {symbol}"),
        };
        let first = symbols.first().cloned().unwrap_or_default();
        let mut y_title = figure.y_title.clone();
        match symbols.iter().all(|symbol| *symbol == first) && !y_title.is_empty() {
            true => y_title = with_unit(&y_title, &first),
            false => panels
                .iter_mut()
                .zip(&symbols)
                .for_each(|(panel, symbol)| panel.title = with_unit(&panel.title, symbol)),
        }
        let words = Words { title: &figure.caption, x: &figure.x_title, y: &y_title };
        let any = panels.iter().any(|panel| !panel.marks.is_empty());
        any.then(|| panels::lines(&words, &panels, figure.log_x, figure.shared))
    }

    /// The unit of a panel's lines.
    fn unit_of(&self, figure: &Figure, panel: &spec::Panel) -> String {
        let unit = || {
            let measure = figure.all.and(&figure.items.first()?.all).and(&panel.all);
            let records = self.machines.experiment(&measure).ok()?;
            let named = |record: &&Record| {
                Some(&record.metric.name) == measure.metric.as_ref() && measure.against.is_none()
            };
            Some(records.into_iter().find(named)?.metric.unit.clone())
        };
        unit().unwrap_or_else(|| "ratio".to_owned())
    }

    /// The plot `experiment/plot` of a section, from one machine's records.
    fn plot(&mut self, place: &str, figure: &Figure) -> Option<Drawing> {
        let drawn = self.plot_of(figure);
        if let Err(why) = &drawn {
            self.problems.push(format!("{place}: {why}"));
        }
        drawn.ok()
    }

    fn plot_of(&self, figure: &Figure) -> Result<Drawing, String> {
        let (experiment, name) = figure.x.split_once('/').ok_or("`x` is not of the form experiment/plot")?;
        let specs = self
            .specs
            .experiment(experiment)
            .ok_or_else(|| format!("no experiment is named `{experiment}`"))?;
        let plot = specs
            .plots
            .iter()
            .find(|plot| plot.name == name)
            .ok_or_else(|| format!("no plot is named `{name}`"))?;
        let mut plot = plot.clone();
        plot.title = escape(&figure.caption);
        for (key, value) in &figure.all.of.0.0 {
            plot.filter.0.0.insert(key.clone(), value.clone());
        }
        let measure = Measure { experiment: Some(experiment.into()), ..figure.all.clone() };
        let records: Vec<Record> = self.machines.experiment(&measure)?.into_iter().cloned().collect();
        let measured = Measurements::from_records(&records);
        let wide = plot::draw(&plot, &measured).ok_or("the plot has no record")?;
        let narrow = plot::draw_narrow(&plot, &measured).ok_or("the plot has no record")?;
        Ok(Drawing { wide, narrow })
    }
}

fn interval(value: &Estimate) -> Option<(f64, f64)> {
    if let Certainty::Interval(low, high) = value.certainty { Some((low.max(0.0), high)) } else { None }
}
