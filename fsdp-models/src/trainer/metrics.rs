//! Metrics of a training run as JSON lines.

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use fsdp::files::{self, FileError};

/// What one optimizer step reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Counted from 1.
    pub step: usize,
    /// Mean over ranks and microbatches, in nats a token.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens of the global batch over the step's time.
    pub tokens_per_s: f64,
    /// Wall time of the step in milliseconds.
    pub step_ms: f64,
}

/// What a whole run reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Steps made.
    pub steps: usize,
    /// Median of the step times in milliseconds, warm-up excluded.
    pub median_step_ms: Option<f64>,
    /// Tokens of the global batch over the median step time.
    pub tokens_per_s: Option<f64>,
    /// Bytes per category and rank, current and peak.
    pub memory: Value,
    /// Bytes moved by each collective and bytes copied for packing.
    pub traffic: Value,
}

/// Writes one JSON object a line: a [`StepMetrics`] for each step, then `{"summary": ..}`.
///
/// Lines are in the file as soon as they are written, so that a run can be followed. A number that is not
/// finite is written as `null`.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    path: PathBuf,
}

impl MetricsWriter {
    /// Creates or empties the file.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let file = files::open_to_write(path)?;
        file.set_len(0).map_err(FileError::on("write", path))?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Opens the file of a run that goes on after `done` steps: the lines of these stay and are returned, what comes after them, which the run will do again, is cut off. A file that is not there yet is created.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn resume(path: &Path, done: usize) -> Result<(Self, Vec<StepMetrics>), FileError> {
        let text = match files::read_to_string(path, u64::MAX) {
            Err(error) if error.cause.kind() == ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let mut steps: Vec<StepMetrics> = Vec::new();
        let mut kept = 0;
        // A killed run may have left half a line, a complete one a summary.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            match serde_json::from_str::<StepMetrics>(line) {
                Ok(step) if step.step <= done => steps.push(step),
                _ => break,
            }
            kept += line.len();
        }
        let mut file = files::open_to_write(path)?;
        let cut = file.set_len(kept as u64).and_then(|()| file.seek(SeekFrom::End(0)));
        cut.map_err(FileError::on("write", path))?;
        Ok((Self { file, path: path.to_path_buf() }, steps))
    }

    /// Writes the line of a step.
    ///
    /// # Errors
    /// The write failed.
    pub fn step(&mut self, metrics: &StepMetrics) -> Result<(), FileError> {
        self.line(metrics)
    }

    /// Writes the last line.
    ///
    /// # Errors
    /// The write failed.
    pub fn finish(mut self, summary: &Summary) -> Result<(), FileError> {
        #[derive(Serialize)]
        struct Last<'a> {
            summary: &'a Summary,
        }
        self.line(&Last { summary })
    }

    fn line(&mut self, value: &impl Serialize) -> Result<(), FileError> {
        let on = FileError::on("write", &self.path);
        let mut line = match serde_json::to_vec(value) {
            Ok(line) => line,
            Err(error) => return Err(on(error.into())),
        };
        line.push(b'\n');
        // The file is unbuffered: one call, one whole line.
        self.file.write_all(&line).map_err(on)
    }
}

/// The step times of a run and what they amount to.
#[derive(Clone, Debug)]
pub struct StepTimes {
    tokens_per_step: usize,
    milliseconds: Vec<f64>,
}

impl StepTimes {
    /// No step yet; `tokens_per_step` are the tokens of a global batch.
    pub fn new(tokens_per_step: usize) -> Self {
        Self { tokens_per_step, milliseconds: Vec::new() }
    }

    /// Adds a step and returns its tokens per second.
    pub fn record(&mut self, step_ms: f64) -> f64 {
        self.milliseconds.push(step_ms);
        self.rate(step_ms)
    }

    /// Median step time in milliseconds. Of more than six steps the first three are left out: they learn the
    /// order of units and fill the pools.
    pub fn median_ms(&self) -> Option<f64> {
        let skipped = if self.milliseconds.len() > 6 { 3 } else { 0 };
        let mut times = self.milliseconds[skipped..].to_vec();
        times.sort_by(f64::total_cmp);
        let upper = *times.get(times.len() / 2)?;
        Some(if times.len().is_multiple_of(2) { (times[times.len() / 2 - 1] + upper) / 2.0 } else { upper })
    }

    /// Tokens per second at the median step time.
    pub fn tokens_per_s(&self) -> Option<f64> {
        self.median_ms().map(|step_ms| self.rate(step_ms))
    }

    /// The summary of the run.
    pub fn summary(&self, memory: Value, traffic: Value) -> Summary {
        let (steps, median_step_ms) = (self.milliseconds.len(), self.median_ms());
        Summary { steps, median_step_ms, tokens_per_s: self.tokens_per_s(), memory, traffic }
    }

    fn rate(&self, step_ms: f64) -> f64 {
        self.tokens_per_step as f64 * 1e3 / step_ms
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    const STEP: StepMetrics =
        StepMetrics { step: 1, loss: 5.5, grad_norm: 1.25, lr: 0.001, tokens_per_s: 512.0, step_ms: 1000.0 };

    #[test]
    fn a_line_is_in_the_file_once_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.step(&STEP).unwrap();
        let first = "{\"step\":1,\"loss\":5.5,\"grad_norm\":1.25,\"lr\":0.001,\"tokens_per_s\":512.0,\"step_ms\":1000.0}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), first);
        writer.step(&StepMetrics { step: 2, loss: f64::NAN, ..STEP }).unwrap();
        let mut times = StepTimes::new(512);
        times.record(1000.0);
        writer.finish(&times.summary(json!({"grads": 7}), json!(null))).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[1]["loss"], Value::Null);
        assert_eq!(
            lines[2],
            json!({"summary": {"steps": 1, "median_step_ms": 1000.0, "tokens_per_s": 512.0,
                               "memory": {"grads": 7}, "traffic": null}})
        );
    }

    #[test]
    fn a_run_that_goes_on_replaces_the_lines_of_the_steps_it_does_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let at = |step, loss| StepMetrics { step, loss, ..STEP };
        let (mut writer, before) = MetricsWriter::resume(&path, 0).unwrap();
        assert!(before.is_empty());
        (1..=4).for_each(|step| writer.step(&at(step, 5.0)).unwrap());
        // Killed in the middle of a line.
        writer.file.write_all(b"{\"step\":5,").unwrap();

        let (mut writer, before) = MetricsWriter::resume(&path, 2).unwrap();
        assert_eq!(before, [at(1, 5.0), at(2, 5.0)]);
        writer.step(&at(3, 4.0)).unwrap();
        let times = StepTimes::new(1);
        writer.finish(&times.summary(json!(0), json!(0))).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 4);
        // The summary of a run that was complete goes, too.
        let (_, before) = MetricsWriter::resume(&path, 9).unwrap();
        assert_eq!(before, [at(1, 5.0), at(2, 5.0), at(3, 4.0)]);
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 3);
    }

    #[test]
    fn losses_keep_all_their_bits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let loss = 5.545_177_444_479_563;
        MetricsWriter::create(&path).unwrap().step(&StepMetrics { loss, ..STEP }).unwrap();
        let line: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(line["loss"].as_f64().unwrap().to_bits(), loss.to_bits());
    }

    #[test]
    fn an_unwritable_place_fails_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("no").join("m.jsonl");
        let message = MetricsWriter::create(&path).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot write `{}`: ", path.display())), "{message}");
    }

    #[test]
    fn the_median_leaves_out_the_warm_up_of_long_runs() {
        let median = |times: &[f64]| {
            let mut steps = StepTimes::new(1);
            for &step_ms in times {
                steps.record(step_ms);
            }
            steps.median_ms()
        };
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[4.0]), Some(4.0));
        assert_eq!(median(&[9.0, 1.0, 2.0, 4.0, 8.0, 16.0]), Some(6.0));
        assert_eq!(median(&[90.0, 80.0, 70.0, 4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[90.0, 80.0, 70.0, 4.0, 1.0, 3.0, 2.0, 5.0]), Some(3.0));
    }

    #[test]
    fn the_rate_is_tokens_over_time() {
        let mut steps = StepTimes::new(2048);
        assert_eq!(steps.record(500.0), 4096.0);
        assert_eq!(steps.tokens_per_s(), Some(4096.0));
    }
}
