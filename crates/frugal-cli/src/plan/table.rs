//! Tables of plain text: columns as wide as their widest cell, the first to the left, the others to the right.

/// A table of `header` and `rows`. A row of a single empty cell becomes a rule.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (column, (cell, width)) in cells.zip(&widths).enumerate() {
            let space = " ".repeat(width - cell.chars().count());
            text += &if column == 0 { format!("{cell}{space}") } else { format!("  {space}{cell}") };
        }
        text.trim_end().to_owned() + "\n"
    };
    let rule = "─".repeat(widths.iter().sum::<usize>() + 2 * (widths.len() - 1)) + "\n";
    let mut text = line(&mut header.iter().copied()) + &rule;
    for row in rows {
        let is_rule = row.len() == 1 && row[0].is_empty();
        text += &if is_rule { rule.clone() } else { line(&mut row.iter().map(String::as_str)) };
    }
    text
}

/// The row that [`table`] draws as a rule.
pub(crate) fn rule() -> Vec<String> {
    vec![String::new()]
}

/// FLOPs in scientific notation.
pub(crate) fn flops_text(flops: u128) -> String {
    format!("{:.4e}", flops as f64)
}

/// FLOPs for JSON: an integer, or a float where that does not fit.
pub(crate) fn flops_json(flops: u128) -> serde_json::Value {
    match u64::try_from(flops) {
        Ok(integer) => integer.into(),
        Err(_) => (flops as f64).into(),
    }
}
