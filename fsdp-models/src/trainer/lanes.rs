//! Draws one step of a trace as SVG, with a lane for each stream of each rank.

use std::fmt::Write as _;
use std::io::Write as _;

use fsdp::trace::Span;

use fsdp::files::{AtomicFile, FileError};

const LANES: [&str; 3] = ["compute", "all-gather", "reduce"];
const LABEL: f64 = 130.0;
const WIDTH: f64 = 1100.0;
const LANE: f64 = 26.0;
const GAP: f64 = 14.0;
const TOP: f64 = 44.0;
/// Rectangles narrower than this have no text.
const TEXT_FROM: f64 = 34.0;

/// Draws the last whole step of `ranks`' spans into a file opened by [`plot::create`](super::plot::create).
///
/// # Errors
/// If the file cannot be written.
pub fn write_lanes(mut file: AtomicFile, ranks: &[Vec<Span>]) -> Result<(), FileError> {
    let target = file.target().to_path_buf();
    file.write_all(lanes_svg(ranks).as_bytes()).map_err(FileError::on("write", &target))?;
    file.commit()
}

/// The last whole step of `ranks`' spans, as SVG text. Without an optimizer step in the spans, all of them.
pub fn lanes_svg(ranks: &[Vec<Span>]) -> String {
    let (from, to) = last_step(ranks.first().map_or(&[][..], Vec::as_slice));
    let scale = (WIDTH - LABEL) / (to.saturating_sub(from)).max(1) as f64;
    let height = TOP + ranks.len() as f64 * (LANES.len() as f64 * LANE + GAP) + 26.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LABEL}\" y=\"24\" font-size=\"15\">One training step: {:.1} ms</text>\n",
        (to - from) as f64 / 1e6
    );
    for (rank, spans) in ranks.iter().enumerate() {
        for (lane, name) in LANES.iter().enumerate() {
            let y = TOP + rank as f64 * (LANES.len() as f64 * LANE + GAP) + lane as f64 * LANE;
            let _ = writeln!(svg, "<text x=\"6\" y=\"{:.1}\">rank {rank} {name}</text>", y + 16.0);
            let in_step =
                spans.iter().filter(|span| span.lane == *name && span.end > from && span.start < to);
            // Whole-model spans lie around those of the units.
            for span in in_step.filter(|span| !span.name.starts_with("model ")) {
                let x = LABEL + (span.start.max(from) - from) as f64 * scale;
                let width = ((span.end.min(to) - span.start.max(from)) as f64 * scale).max(0.7);
                let unit = if span.unit.is_empty() { "root" } else { &span.unit };
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{}\" stroke=\"white\" \
                     stroke-width=\"0.5\"><title>{} {unit}, {:.2} ms</title></rect>",
                    LANE - 5.0,
                    color(span.name),
                    span.name,
                    (span.end - span.start) as f64 / 1e6
                );
                if width > TEXT_FROM {
                    let label = unit.rsplit('.').next().unwrap_or(unit);
                    let middle = x + width / 2.0;
                    let _ = writeln!(
                        svg,
                        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"white\">{label}</text>",
                        y + 15.0
                    );
                }
            }
        }
    }
    let legend = ["forward", "backward", "recompute", "all-gather", "reduce-scatter", "optimizer"];
    for (index, name) in legend.iter().enumerate() {
        let (x, y) = (LABEL + index as f64 * 130.0, height - 20.0);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"{}\">{name}</text>",
            color(name),
            x + 17.0,
            y + 10.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// From the end of the last optimizer step but one to the end of the last.
fn last_step(spans: &[Span]) -> (u64, u64) {
    let mut ends: Vec<u64> =
        spans.iter().filter(|span| span.name == "optimizer").map(|span| span.end).collect();
    ends.sort_unstable();
    let first = spans.iter().map(|span| span.start).min().unwrap_or(0);
    let last = spans.iter().map(|span| span.end).max().unwrap_or(0);
    match ends.as_slice() {
        [.., from, to] => (*from, *to),
        [to] => (first, *to),
        [] => (first, last),
    }
}

fn color(name: &str) -> &'static str {
    match name {
        "forward" => "#2c7fb8",
        "backward" => "#253494",
        "recompute" => "#41b6c4",
        "all-gather" => "#31a354",
        "optimizer" => "#756bb1",
        _ => "#d95f0e",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(lane: &'static str, name: &'static str, unit: &str, start: u64, end: u64) -> Span {
        Span { lane, name, unit: unit.into(), issued: start, start, end }
    }

    #[test]
    fn the_last_step_is_drawn_and_no_other() {
        let spans = vec![
            span("compute", "forward", "first", 0, 10),
            span("compute", "optimizer", "optimizer", 10, 20),
            span("compute", "forward", "layers.7", 20, 90),
            span("all-gather", "all-gather", "layers.8", 25, 60),
            span("compute", "optimizer", "optimizer", 90, 100),
        ];
        let svg = lanes_svg(&[spans.clone(), spans]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("forward layers.7,").count(), 2);
        assert_eq!(svg.matches("all-gather layers.8,").count(), 2);
        assert!(!svg.contains("forward first"));
    }

    #[test]
    fn nothing_to_draw_is_no_error() {
        assert!(lanes_svg(&[]).contains("</svg>"));
        assert!(lanes_svg(&[vec![]]).contains("0.0 ms"));
    }
}
