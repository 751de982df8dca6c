//! Progress on the terminal, or in a log.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{metrics::StepMetrics, quantity};

/// In a log, a line each time this share of the steps is done.
const LOG_PERCENT: u128 = 10;

/// Shows step, loss, tokens per second and the time that is left, on standard error: as a bar on a terminal,
/// as a line now and then elsewhere. One rank of a run makes one.
#[derive(Debug)]
pub struct Progress {
    steps: usize,
    /// Steps shown so far: fewer than are done if the run goes on from a checkpoint.
    shown: usize,
    /// Their wall time.
    elapsed_ms: f64,
    sink: Sink,
}

enum Sink {
    Bar(ProgressBar),
    Log(Box<dyn Write + Send>),
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sink::Bar(_) => "Bar",
            Sink::Log(_) => "Log",
        })
    }
}

impl Progress {
    /// For a run of `steps` steps.
    pub fn new(steps: usize) -> Self {
        if !io::stderr().is_terminal() {
            return Self::log(steps, Box::new(io::stderr()));
        }
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        // The template is a constant; were it wrong, indicatif's own style would do.
        if let Ok(style) =
            ProgressStyle::with_template("step {pos}/{len} [{wide_bar:.cyan/blue}] {msg}  ETA {eta}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { steps, shown: 0, elapsed_ms: 0.0, sink: Sink::Bar(bar) }
    }

    /// Writes lines to `log` instead: one after the first step, then one each tenth of the way.
    pub fn log(steps: usize, log: Box<dyn Write + Send>) -> Self {
        Self { steps, shown: 0, elapsed_ms: 0.0, sink: Sink::Log(log) }
    }

    /// Shows a step that is done.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let done = metrics.step;
        self.shown += 1;
        self.elapsed_ms += metrics.step_ms;
        let state = format!("loss {:.4}  {} tokens/s", metrics.loss, quantity::rate(metrics.tokens_per_s));
        match &mut self.sink {
            Sink::Bar(bar) => {
                bar.set_message(state);
                bar.set_position(done as u64);
            }
            Sink::Log(log) if self.shown == 1 || is_logged(done, self.steps) => {
                let left = self.steps.saturating_sub(done) as f64 * self.elapsed_ms / self.shown as f64 / 1e3;
                let width = self.steps.to_string().len();
                let (steps, eta) = (self.steps, quantity::duration(left));
                // Training does not stop because nobody can read about it.
                let _ = writeln!(log, "step {done:width$}/{steps}  {state}  ETA {eta}");
            }
            Sink::Log(_) => {}
        }
    }

    /// Writes a line that stays, above the bar.
    pub fn note(&mut self, line: &str) {
        match &mut self.sink {
            Sink::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Sink::Log(log) => {
                let _ = writeln!(log, "{line}");
            }
        }
    }

    /// Leaves the bar as it stands and goes to the next line. Dropping does the same.
    pub fn finish(self) {}
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Sink::Bar(bar) = &self.sink {
            bar.abandon();
        }
    }
}

/// The first step, and those with which another [`LOG_PERCENT`] is reached.
fn is_logged(done: usize, steps: usize) -> bool {
    let tenths = |done: usize| done as u128 * 100 / (steps.max(1) as u128 * LOG_PERCENT);
    done == 1 || tenths(done) > tenths(done - 1)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_log_gets_the_first_step_and_every_tenth_of_the_way() {
        let logged = |steps| -> Vec<usize> { (1..=steps).filter(|&done| is_logged(done, steps)).collect() };
        assert_eq!(logged(100), [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
        assert_eq!(logged(3), [1, 2, 3]);
        assert_eq!(logged(25), [1, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25]);
        assert_eq!(logged(1), [1]);
    }

    #[test]
    fn a_line_tells_step_loss_rate_and_time_left() {
        let log = Shared::default();
        let mut progress = Progress::log(20, Box::new(log.clone()));
        progress.note("warming up");
        for step in 1..=2 {
            progress.step(&StepMetrics {
                step,
                loss: 3.210_98,
                grad_norm: 1.0,
                lr: 1e-3,
                tokens_per_s: 4512.3,
                step_ms: 5000.0,
            });
        }
        progress.finish();
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert_eq!(
            text,
            "warming up\n\
             step  1/20  loss 3.2110  4,512 tokens/s  ETA 1 min 35 s\n\
             step  2/20  loss 3.2110  4,512 tokens/s  ETA 1 min 30 s\n"
        );
    }
}
