//! Loss and gradient-norm curves as SVG.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use plotters::{
    coord::{
        Shift,
        ranged1d::{AsRangedCoord, Ranged, ValueFormatter},
    },
    prelude::*,
};

use super::metrics::StepMetrics;
pub use crate::error::PlotError;
use fsdp::files::{AtomicFile, FileError};

const SIZE: (u32, u32) = (900, 640);
const LOSS_COLOR: RGBColor = RGBColor(31, 119, 180);
const NORM_COLOR: RGBColor = RGBColor(214, 86, 23);
const FONT: &str = "sans-serif";

type Panel<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// What the library that draws says is wrong.
struct Undrawn(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for Undrawn {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Undrawn(error.to_string())
    }
}

/// Opens a file to draw into. Its name ends in `.svg`, or says nothing.
///
/// # Errors
/// The name has another ending, or the file cannot be made.
pub fn create(path: &Path) -> Result<AtomicFile, PlotError> {
    match path.extension() {
        Some(ending) if !ending.eq_ignore_ascii_case("svg") => {
            Err(PlotError::Ending { path: path.to_path_buf() })
        }
        _ => Ok(AtomicFile::create(path)?),
    }
}

/// Draws the curves into a file opened by [`create`].
///
/// # Errors
/// The chart cannot be drawn or written.
pub fn write_curves(mut file: AtomicFile, title: &str, steps: &[StepMetrics]) -> Result<(), PlotError> {
    let svg = curves_svg(title, steps)?;
    let target = file.target().to_path_buf();
    file.write_all(svg.as_bytes()).map_err(FileError::on("write", &target))?;
    Ok(file.commit()?)
}

/// [`write_curves`] into a new file at `path`.
///
/// # Errors
/// The chart cannot be drawn or written.
pub fn save_curves(path: &Path, title: &str, steps: &[StepMetrics]) -> Result<(), PlotError> {
    write_curves(create(path)?, title, steps)
}

/// An SVG document of two panels over the steps: the loss above, the gradient norm below.
///
/// A value that is not finite leaves a gap. The norm has a logarithmic axis if it is positive throughout and
/// spans more than two decades.
///
/// # Errors
/// The chart cannot be drawn.
pub fn curves_svg(title: &str, steps: &[StepMetrics]) -> Result<String, PlotError> {
    drawn(title, steps).map_err(|Undrawn(why)| PlotError::Drawing(why))
}

fn drawn(title: &str, steps: &[StepMetrics]) -> Result<String, Undrawn> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let panels = root.margin(10, 0, 0, 0).titled(title, (FONT, 22))?.split_evenly((2, 1));
        let loss = Curve::new("loss (nats per token)", LOSS_COLOR, steps, |m| m.loss);
        loss.draw_linear(&panels[0])?;
        let norm = Curve::new("gradient norm", NORM_COLOR, steps, |m| m.grad_norm);
        match norm.decades() {
            Some(range) => norm.draw(&panels[1], range.log_scale(), &|value| decade_label(*value))?,
            None => norm.draw_linear(&panels[1])?,
        }
        root.present()?;
    }
    Ok(svg)
}

/// One quantity over the steps.
struct Curve {
    name: &'static str,
    color: RGBColor,
    steps: Range<usize>,
    /// Runs of finite values.
    runs: Vec<Vec<(usize, f64)>>,
}

impl Curve {
    fn new(
        name: &'static str,
        color: RGBColor,
        steps: &[StepMetrics],
        value: impl Fn(&StepMetrics) -> f64,
    ) -> Self {
        let points: Vec<_> = steps.iter().map(|m| (m.step, value(m))).collect();
        let runs = points.split(|(_, value)| !value.is_finite()).filter(|run| !run.is_empty());
        let first = steps.first().map_or(0, |m| m.step);
        let last = steps.last().map_or(0, |m| m.step).max(first + 1);
        Self { name, color, steps: first..last, runs: runs.map(<[_]>::to_vec).collect() }
    }

    /// Smallest and largest value.
    fn extent(&self) -> Option<(f64, f64)> {
        let values = self.runs.iter().flatten().map(|&(_, value)| value);
        values.fold(None, |extent, v| {
            extent.map_or(Some((v, v)), |(low, high)| Some((v.min(low), v.max(high))))
        })
    }

    /// The values with some room; a constant is in the middle.
    fn linear_range(&self) -> Range<f64> {
        let Some((low, high)) = self.extent() else { return 0.0..1.0 };
        let room = match high - low {
            span if span > 1e-9 * high.abs() => 0.05 * span,
            _ if high != 0.0 => 0.1 * high.abs(),
            _ => 1.0,
        };
        low - room..high + room
    }

    /// Where a logarithmic axis fits, its range.
    fn decades(&self) -> Option<Range<f64>> {
        let (low, high) = self.extent()?;
        (low > 0.0 && high / low > 100.0).then(|| low / 1.3..high * 1.3)
    }

    fn draw_linear(&self, area: &Panel<'_>) -> Result<(), Undrawn> {
        let range = self.linear_range();
        let span = range.end - range.start;
        self.draw(area, range, &|value| linear_label(*value, span))
    }

    fn draw<Y>(&self, area: &Panel<'_>, range: Y, label: &dyn Fn(&f64) -> String) -> Result<(), Undrawn>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(76)
            .build_cartesian_2d(self.steps.clone(), range)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(self.name)
            .x_labels(10)
            .y_labels(6)
            .y_label_formatter(&label)
            .label_style((FONT, 14))
            .axis_desc_style((FONT, 15))
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.12))
            .draw()?;
        for run in &self.runs {
            match run.as_slice() {
                &[point] => drop(chart.draw_series([Circle::new(point, 3, self.color.filled())])?),
                points => {
                    let line = LineSeries::new(points.iter().copied(), self.color.stroke_width(2));
                    chart.draw_series(line)?;
                }
            }
        }
        Ok(())
    }
}

/// A label of a linear axis of this span: as many digits as tell neighbours apart.
fn linear_label(value: f64, span: f64) -> String {
    if !(1e-6..1e6).contains(&span) {
        return format!("{value:.2e}");
    }
    let decimals = (-(span / 8.0).log10()).ceil().max(0.0) as usize;
    format!("{value:.decimals$}")
}

/// A label of a logarithmic axis, mostly a power of ten.
fn decade_label(value: f64) -> String {
    if !(1e-3..1e5).contains(&value) {
        return format!("{value:.0e}");
    }
    // The axis multiplies its way up: 0.30000000000000004 is 0.3.
    let rounded = format!("{value:.4}");
    rounded.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(values: &[(f64, f64)]) -> Vec<StepMetrics> {
        let metrics = |(at, &(loss, grad_norm)): (usize, &(f64, f64))| StepMetrics {
            step: at + 1,
            loss,
            grad_norm,
            lr: 1e-3,
            tokens_per_s: 1.0,
            step_ms: 1.0,
        };
        values.iter().enumerate().map(metrics).collect()
    }

    fn svg(values: &[(f64, f64)]) -> String {
        let svg = curves_svg("run", &steps(values)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        for text in ["run", "step", "loss (nats per token)", "gradient norm"] {
            assert!(svg.contains(&format!("\n{text}\n")), "{text} is not in {svg}");
        }
        svg
    }

    /// Lines of a curve: the axes and the grid have other colors.
    fn lines(svg: &str, color: RGBColor) -> usize {
        let RGBColor(r, g, b) = color;
        svg.matches(&format!("<polyline fill=\"none\" opacity=\"1\" stroke=\"#{r:02X}{g:02X}{b:02X}\""))
            .count()
    }

    #[test]
    fn both_curves_are_drawn() {
        let svg = svg(&[(5.5, 1.0), (5.0, 0.9), (4.5, 1.2)]);
        assert_eq!((lines(&svg, LOSS_COLOR), lines(&svg, NORM_COLOR)), (1, 1));
    }

    #[test]
    fn one_step_is_a_dot() {
        let svg = svg(&[(5.5, 1.0)]);
        assert_eq!((lines(&svg, LOSS_COLOR), svg.matches("<circle").count()), (0, 2));
    }

    #[test]
    fn a_value_that_is_not_finite_is_a_gap() {
        let svg = svg(&[(5.0, 1.0), (4.0, 1.0), (f64::NAN, f64::INFINITY), (3.0, 1.0), (2.0, 1.0)]);
        assert_eq!((lines(&svg, LOSS_COLOR), lines(&svg, NORM_COLOR)), (2, 2));
    }

    #[test]
    fn nothing_finite_and_nothing_at_all_are_empty_panels() {
        for values in [&[(f64::NAN, f64::NAN); 3][..], &[]] {
            let svg = svg(values);
            assert_eq!((lines(&svg, LOSS_COLOR), svg.matches("<circle").count()), (0, 0));
        }
    }

    #[test]
    fn constants_have_room_around_them() {
        for (value, range) in [(2.0, 1.8..2.2), (0.0, -1.0..1.0), (-2.0, -2.2..-1.8)] {
            let curve = Curve::new("x", LOSS_COLOR, &steps(&[(value, 0.0); 4]), |m| m.loss);
            assert_eq!(curve.linear_range(), range);
            svg(&[(value, value); 4]);
        }
    }

    #[test]
    fn the_axis_is_logarithmic_beyond_two_decades() {
        let decades = |values: &[f64]| {
            let values: Vec<_> = values.iter().map(|&norm| (0.0, norm)).collect();
            Curve::new("x", NORM_COLOR, &steps(&values), |m| m.grad_norm).decades().is_some()
        };
        assert!(decades(&[0.01, 1.01]));
        assert!(!decades(&[0.01, 1.0]));
        assert!(!decades(&[0.0, 1000.0]));
        assert!(!decades(&[]));
        svg(&[(1.0, 0.01), (1.0, 3.0), (1.0, 1000.0)]);
    }

    #[test]
    fn labels_have_the_digits_that_tell_them_apart() {
        let labels =
            [(5.5, 3.0), (0.4, 1.2), (0.25, 0.02), (1234.0, 1e4), (2e7, 1e8), (0.0, 1.0), (5.0, 1e-9)];
        let labels = labels.map(|(value, span)| linear_label(value, span));
        assert_eq!(labels, ["5.5", "0.4", "0.250", "1234", "2.00e7", "0.0", "5.00e0"]);
        assert_eq!(
            [0.1 + 0.2, 1.0, 1000.0, 1e6, 1e-5].map(decade_label),
            ["0.3", "1", "1000", "1e6", "1e-5"]
        );
    }

    #[test]
    fn the_file_is_the_document() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("curves.svg");
        let steps = steps(&[(1.0, 1.0), (0.5, 0.5)]);
        save_curves(&path, "a < b", &steps).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, curves_svg("a < b", &steps).unwrap());
        assert!(text.contains("a &lt; b"));
        assert!(matches!(save_curves(&dir.path().join("no").join("x"), "", &[]), Err(PlotError::File(_))));
        for name in ["curves.png", "curves.svg.PDF", "curves.JPEG"] {
            let path = dir.path().join(name);
            let expected = format!(
                "cannot draw into `{}`: it would be an SVG, so its name must end in .svg",
                path.display()
            );
            assert_eq!(save_curves(&path, "", &[]).unwrap_err().to_string(), expected);
            assert!(!path.exists());
        }
        save_curves(&dir.path().join("curves.SVG"), "", &[]).unwrap();
    }
}
