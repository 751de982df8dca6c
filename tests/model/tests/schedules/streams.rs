//! Streams and events.

use fsdp_model_check::streams;

#[test]
fn events_order_streams() {
    streams::events_order_streams(500);
}

#[test]
fn a_failure_passes_along_events() {
    streams::a_failure_passes_along_events(500);
}
