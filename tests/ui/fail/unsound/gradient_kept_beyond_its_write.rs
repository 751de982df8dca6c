#![forbid(unsafe_code)]

use fsdp::GradSink;

fn keep(sink: &GradSink) {
    let mut kept: Option<&mut [f32]> = None;
    let _ = sink.accumulate_f32(|values, _| -> Result<(), ()> {
        kept = Some(values);
        Ok(())
    });
}

fn main() {}
