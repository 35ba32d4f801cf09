//! A figure or table of an article, with the sizes and machines of what it shows.

use std::collections::BTreeMap;

use super::Builder;
use crate::measurements::distinct;
use crate::plot::escape;
use crate::prose;
use crate::spec::{Exhibit, Figure, Measure};

impl Builder<'_> {
    pub(super) fn exhibit(
        &mut self,
        place: &str,
        exhibit: &Exhibit,
        values: &BTreeMap<String, Measure>,
    ) -> String {
        let mut html =
            format!("<section>\n<h3>{}</h3>\n", prose::inline(&self.words(place, &exhibit.title, values)));
        if let Some(figure) = &exhibit.figure {
            let caption = self.words(place, &figure.caption, values);
            html += &self.figure(place, &Figure { caption, ..figure.clone() });
        }
        if let Some(table) = &exhibit.table {
            html += &self.grid(place, table);
        }
        let used = self.used(exhibit);
        let machines = self.machines.line_of(&used);
        if machines.is_empty() {
            self.problems.push(format!("{place}: no record of any machine"));
        }
        html + &format!(
            "<p class=\"setting\">{} {}.</p>\n</section>\n",
            prose::inline(&exhibit.setting),
            escape(&machines)
        )
    }

    /// The machines and experiments of an exhibit's cells and marks.
    fn used(&self, exhibit: &Exhibit) -> Vec<(String, String)> {
        let mut all: Vec<Measure> = Vec::new();
        if let Some(table) = &exhibit.table {
            for row in &table.rows {
                for column in &table.columns {
                    let cell = table.all.and(&row.all).and(&column.all);
                    all.push(cell.clone());
                    let with = |name: &String| Measure { machine: Some(name.clone()), ..cell.clone() };
                    all.extend(table.machines.iter().map(with));
                }
            }
        }
        if let Some(figure) = &exhibit.figure {
            if let Some((experiment, _)) = figure.x.split_once('/') {
                all.push(Measure { experiment: Some(experiment.into()), ..figure.all.clone() });
            }
            for panel in &figure.panels {
                all.extend(figure.items.iter().map(|item| figure.all.and(&item.all).and(&panel.all)));
            }
        }
        distinct(all.into_iter().filter_map(|measure| Some((measure.machine?, measure.experiment?))))
    }
}
