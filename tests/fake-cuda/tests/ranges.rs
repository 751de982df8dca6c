//! What a profiler is told of spans.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use fake_cuda::{PROFILER, ranges};
use fsdp_runtime::comm::CommError;
use fsdp_runtime::device::cpu::ComputeStream;
use fsdp_runtime::trace::Tracer;

// One test, as a profiler attaches once in a process.
#[test]
fn every_span_is_a_range_of_its_thread_and_ends_on_every_path() {
    // SAFETY: this is the only test of its program, and no thread that it has started reads the environment.
    unsafe { std::env::set_var("NVTX_INJECTION64_PATH", PROFILER) };
    let compute = ComputeStream::new("compute");
    let (root, unit, next): (Arc<str>, Arc<str>, Arc<str>) =
        ("".into(), "layers.3".into(), "layers.4".into());

    // Whether spans are recorded or not.
    for tracer in [Tracer::new(true), Tracer::new(false)] {
        let model = tracer.begin(&*compute, "model forward", &root);
        let forward = tracer.begin(&*compute, "forward", &unit);
        tracer.enqueue(&*compute, "all-gather", "all-gather", &next, || Ok(())).unwrap();
        tracer.compute(&*compute, forward);
        tracer.compute(&*compute, model);
    }
    let spans = [
        "compute: model forward (root)",
        "  compute: forward layers.3",
        "    all-gather: all-gather layers.4",
    ];
    let mut expected = [spans, spans].concat();
    expected.push("domain fsdp, 0 open");
    assert_eq!(ranges(), expected);

    // Spans that end early: by an error, by a panic, in two threads.
    let tracer = Tracer::new(true);
    let failed = CommError::Stream { stream: "reduce".into(), message: "failed".into() };
    let fail = || tracer.enqueue(&*compute, "reduce", "reduce-scatter", &unit, || Err(failed.clone()));
    thread::scope(|scope| {
        let step = || {
            let _optimizer = tracer.begin(&*compute, "optimizer", &unit);
            fail().unwrap_err();
        };
        scope.spawn(step).join().unwrap();
        let panics = || {
            let _backward = tracer.begin(&*compute, "backward", &unit);
            let _ =
                tracer.enqueue(&*compute, "outer reduce", "outer all-reduce", &unit, || panic!("on purpose"));
        };
        scope.spawn(move || catch_unwind(AssertUnwindSafe(panics)).unwrap_err()).join().unwrap();
    });
    let ended = [
        "compute: optimizer layers.3",
        "  reduce: reduce-scatter layers.3",
        "compute: backward layers.3",
        "  outer reduce: outer all-reduce layers.3",
        "domain fsdp, 0 open",
    ];
    assert_eq!(ranges()[6..], ended);
}
