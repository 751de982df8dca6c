//! What ran when: spans of compute, gather and reduce on one clock for all ranks of the process.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::comm::CommError;
use crate::device::Stream;

/// One piece of work on one lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// `compute`, `all-gather` or `reduce`.
    pub lane: &'static str,
    /// `forward`, `backward`, `recompute`, `all-gather`, `reduce-scatter`, ...
    pub name: &'static str,
    /// Path of the unit.
    pub unit: Arc<str>,
    /// When the host issued it, in nanoseconds of the process's trace clock.
    pub issued: u64,
    /// When it began to run.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Records spans of one rank; free when switched off.
#[derive(Debug)]
pub struct Tracer {
    enabled: bool,
    spans: Mutex<Vec<Span>>,
}

/// Nanoseconds since the first call in this process.
pub fn now() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

impl Tracer {
    /// A tracer that records, or one that does nothing.
    pub fn new(enabled: bool) -> Arc<Tracer> {
        Arc::new(Tracer { enabled, spans: Mutex::new(Vec::new()) })
    }

    /// Records a span that ran on the compute lane from `start` until now.
    pub fn compute(&self, name: &'static str, unit: &Arc<str>, start: u64) {
        if self.enabled {
            let span = Span { lane: "compute", name, unit: unit.clone(), issued: start, start, end: now() };
            self.spans.lock().push(span);
        }
    }

    /// Enqueues work on `stream` between two markers that time it.
    ///
    /// # Errors
    /// Those of `enqueue`.
    pub fn enqueue(
        self: &Arc<Self>,
        stream: &dyn Stream,
        lane: &'static str,
        name: &'static str,
        unit: &Arc<str>,
        enqueue: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if !self.enabled {
            return enqueue();
        }
        let issued = now();
        let begun = Arc::new(OnceLock::new());
        let mark = begun.clone();
        stream.submit(Box::new(move || {
            mark.get_or_init(now);
            Ok(())
        }))?;
        enqueue()?;
        let (tracer, unit) = (self.clone(), unit.clone());
        stream.submit(Box::new(move || {
            let start = begun.get().copied().unwrap_or(issued);
            tracer.spans.lock().push(Span { lane, name, unit, issued, start, end: now() });
            Ok(())
        }))
    }

    /// The spans so far, by start.
    pub fn spans(&self) -> Vec<Span> {
        let mut spans = self.spans.lock().clone();
        spans.sort_by_key(|span| (span.start, span.end));
        spans
    }

    /// Forgets the spans so far.
    pub fn clear(&self) {
        self.spans.lock().clear();
    }
}

/// Spans of several ranks as Chrome trace events: one process a rank, one lane a stream. Loads in Perfetto
/// and `chrome://tracing`.
pub fn chrome_trace(ranks: &[Vec<Span>]) -> Value {
    const LANES: [&str; 3] = ["compute", "all-gather", "reduce"];
    let mut events = Vec::new();
    for (rank, spans) in ranks.iter().enumerate() {
        events.push(
            json!({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": format!("rank {rank}")}}),
        );
        for (lane, name) in LANES.iter().enumerate() {
            events.push(
                json!({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}),
            );
        }
        for span in spans {
            let lane = LANES.iter().position(|lane| *lane == span.lane).unwrap_or(LANES.len());
            let unit = if span.unit.is_empty() { "(root)" } else { &span.unit };
            events.push(json!({
                "ph": "X", "pid": rank, "tid": lane,
                "name": format!("{} {unit}", span.name),
                "cat": span.name,
                "ts": span.start as f64 / 1e3,
                "dur": (span.end - span.start) as f64 / 1e3,
                "args": {"unit": unit, "issued_us": span.issued as f64 / 1e3},
            }));
        }
    }
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}
