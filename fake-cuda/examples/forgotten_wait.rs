//! A stream that copies what another stream has written, without waiting for it: what a GPU would mostly hide.
//!
//!     cargo run --example forgotten_wait
//!
//! prints the stale values and the finding that says why.

use cudarc::driver::{CudaContext, DriverError};
use fake_cuda::{Schedule, Session};

const N: usize = 4;

fn copy_without_waiting() -> Result<Vec<f32>, DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the streams are to be ordered by this program itself, which has forgotten it.
    unsafe { context.disable_event_tracking() };
    let (writer, reader) = (context.new_stream()?, context.new_stream()?);
    let mut written = writer.clone_htod(&[0.0f32; N])?;
    let mut copied = reader.clone_htod(&[0.0f32; N])?;
    context.synchronize()?;
    writer.memcpy_htod(&[1.0; N], &mut written)?;
    // Forgotten: reader.wait(&writer.record_event(None)?)?;
    reader.memcpy_dtod(&written, &mut copied)?;
    let copied = reader.clone_dtoh(&copied)?;
    context.synchronize()?;
    Ok(copied)
}

fn main() -> Result<(), DriverError> {
    for schedule in [Schedule::Latest, Schedule::Earliest] {
        let session = Session::new(schedule);
        println!("{schedule:?}: {:?}", copy_without_waiting()?);
        for finding in session.take_findings() {
            println!("  {finding}");
        }
    }
    Ok(())
}
