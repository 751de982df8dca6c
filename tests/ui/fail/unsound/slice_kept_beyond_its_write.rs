#![forbid(unsafe_code)]

use fsdp::GradSink;

fn keep(sink: &GradSink) {
    let mut kept = None;
    let _ = sink.accumulate_slice(|slice, _| -> Result<(), ()> {
        kept = Some(slice.clone());
        Ok(())
    });
}

fn main() {}
