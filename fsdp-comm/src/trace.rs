//! What ran when: spans of compute, gather and reduce on one clock for all ranks of the process.
//!
//! With the feature `cuda-driver` each span is also an NVTX range for an attached profiler (`nsys profile --trace=cuda,nvtx`), whether
//! spans are recorded or not. The domain is `fsdp`, the name is like `forward layers.3`, the category is the lane.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

pub use crate::device::now;
use crate::device::{HostRange, Mark, Stream};
use crate::error::CommError;

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
pub struct Tracer {
    enabled: bool,
    records: Mutex<Records>,
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracer").field("enabled", &self.enabled).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Records {
    spans: Vec<Span>,
    /// Spans whose end is still to come when they are recorded, without their times.
    enqueued: Vec<Enqueued>,
}

struct Enqueued {
    span: Span,
    start: Arc<dyn Mark>,
    end: Arc<dyn Mark>,
}

/// A span that has begun. One that is dropped is not recorded.
pub struct Begun {
    name: &'static str,
    unit: Arc<str>,
    issued: u64,
    start: Option<Arc<dyn Mark>>,
    _range: HostRange,
}

impl std::fmt::Debug for Begun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Begun").field("name", &self.name).field("unit", &self.unit).finish_non_exhaustive()
    }
}

impl Records {
    /// Times the spans that are over.
    fn collect(&mut self) {
        let Records { spans, enqueued } = self;
        enqueued.retain(|Enqueued { span, start, end }| match (start.time(), end.time()) {
            (Some(start), Some(end)) => {
                spans.push(Span { start, end, ..span.clone() });
                false
            }
            _ => true,
        });
    }
}

impl Tracer {
    /// A tracer that records, or one that does nothing.
    pub fn new(enabled: bool) -> Arc<Tracer> {
        Arc::new(Tracer { enabled, records: Mutex::default() })
    }

    /// A span of the compute lane begins at the present end of `compute`.
    pub fn begin(&self, compute: &dyn Stream, name: &'static str, unit: &Arc<str>) -> Begun {
        let range = HostRange::push("compute", name, unit);
        // A stream that has failed says so where its failure can be told.
        let start = if self.enabled { compute.mark().ok() } else { None };
        Begun { name, unit: unit.clone(), issued: now(), start, _range: range }
    }

    /// Records a span that ran on the compute lane until the present end of `compute`.
    pub fn compute(&self, compute: &dyn Stream, begun: Begun) {
        let Begun { name, unit, issued, start, _range } = begun;
        if let Some(start) = start
            && let Ok(end) = compute.mark()
        {
            let span = Span { lane: "compute", name, unit, issued, start: 0, end: 0 };
            self.records.lock().enqueued.push(Enqueued { span, start, end });
        }
    }

    /// Enqueues work on `stream` between two markers that time it.
    ///
    /// # Errors
    /// Those of `enqueue`.
    pub fn enqueue(
        &self,
        stream: &dyn Stream,
        lane: &'static str,
        name: &'static str,
        unit: &Arc<str>,
        enqueue: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let _range = HostRange::push(lane, name, unit);
        if !self.enabled {
            return enqueue();
        }
        let issued = now();
        let start = stream.mark()?;
        enqueue()?;
        let span = Span { lane, name, unit: unit.clone(), issued, start: 0, end: 0 };
        self.records.lock().enqueued.push(Enqueued { span, start, end: stream.mark()? });
        Ok(())
    }

    /// The spans that are over, by start.
    pub fn spans(&self) -> Vec<Span> {
        let mut records = self.records.lock();
        records.collect();
        let mut spans = records.spans.clone();
        spans.sort_by_key(|span| (span.start, span.end));
        spans
    }

    /// Forgets the spans so far.
    pub fn clear(&self) {
        *self.records.lock() = Records::default();
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
