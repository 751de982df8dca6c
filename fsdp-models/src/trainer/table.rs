//! Plain text tables. By hand: comfy-table cannot rule off a total, and tabled leaves blanks at the ends of lines.

use std::fmt;

/// On which side of its column a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table of `N` columns, printed with a line under the head and columns as wide as they need.
///
/// ```
/// use fsdp_models::trainer::table::{Align, Table};
///
/// let mut table = Table::new([("unit", Align::Left), ("bytes", Align::Right)]);
/// table.row(["root", "1.50 MiB"]);
/// assert_eq!(table.to_string(), "unit     bytes\n----  --------\nroot  1.50 MiB\n");
/// ```
#[derive(Clone, Debug)]
pub struct Table<const N: usize> {
    head: [(String, Align); N],
    lines: Vec<Line<N>>,
}

#[derive(Clone, Debug)]
enum Line<const N: usize> {
    Row([String; N]),
    Rule,
}

impl<const N: usize> Table<N> {
    /// A table with these column heads.
    pub fn new(head: [(&str, Align); N]) -> Self {
        Self { head: head.map(|(title, align)| (title.to_owned(), align)), lines: Vec::new() }
    }

    /// Appends a row.
    pub fn row<S: Into<String>>(&mut self, cells: [S; N]) -> &mut Self {
        self.lines.push(Line::Row(cells.map(Into::into)));
        self
    }

    /// Appends a horizontal line, as above a total.
    pub fn rule(&mut self) -> &mut Self {
        self.lines.push(Line::Rule);
        self
    }

    fn widths(&self) -> [usize; N] {
        std::array::from_fn(|column| {
            let cells = self.lines.iter().map(|line| match line {
                Line::Row(cells) => width(&cells[column]),
                Line::Rule => 0,
            });
            cells.fold(width(&self.head[column].0), usize::max)
        })
    }

    fn write_row(&self, f: &mut fmt::Formatter<'_>, widths: &[usize; N], cells: [&str; N]) -> fmt::Result {
        let mut line = String::new();
        for (column, cell) in cells.into_iter().enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let room = " ".repeat(widths[column] - width(cell));
            let parts = match self.head[column].1 {
                Align::Left => [gap, cell, &room],
                Align::Right => [gap, &room, cell],
            };
            line.extend(parts);
        }
        writeln!(f, "{}", line.trim_end())
    }
}

/// Characters, which is columns for everything that is printed here.
fn width(text: &str) -> usize {
    text.chars().count()
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        let rules = widths.map(|width| "-".repeat(width));
        let rule = rules.each_ref().map(String::as_str);
        self.write_row(f, &widths, self.head.each_ref().map(|(title, _)| title.as_str()))?;
        self.write_row(f, &widths, rule)?;
        for line in &self.lines {
            let cells = match line {
                Line::Row(cells) => cells.each_ref().map(String::as_str),
                Line::Rule => rule,
            };
            self.write_row(f, &widths, cells)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_blanks() {
        let mut table =
            Table::new([("unit", Align::Left), ("elements", Align::Right), ("note", Align::Left)]);
        table.row(["model.layers.0", "200,960", ""]).row(["root", "65,664", "tied: embed"]);
        table.rule().row(["total", "266,624", ""]);
        let expected = [
            "unit            elements  note",
            "--------------  --------  -----------",
            "model.layers.0   200,960",
            "root              65,664  tied: embed",
            "--------------  --------  -----------",
            "total            266,624",
            "",
        ];
        assert_eq!(table.to_string(), expected.join("\n"));
    }

    #[test]
    fn width_is_counted_in_characters() {
        let mut table = Table::new([("a", Align::Right), ("b", Align::Left)]);
        table.row(["é×", "x"]);
        assert_eq!(table.to_string(), " a  b\n--  -\né×  x\n");
    }

    #[test]
    fn a_table_without_rows_is_its_head() {
        assert_eq!(Table::new([("a", Align::Left)]).to_string(), "a\n-\n");
    }
}
