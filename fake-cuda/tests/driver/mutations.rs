//! A program with one wait or record left out is found, unless it did not need it.

use cudarc::driver::{CudaContext, DriverError};
use fake_cuda::{Of, Session, Step, survivors};

const N: usize = 8;

/// Two buffers in turn: the side stream fills one while the main stream reads the other.
fn double_buffered(rounds: usize, waits: usize) -> Result<bool, DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the program orders its streams itself.
    unsafe { context.disable_event_tracking() };
    let (main, side) = (context.new_stream()?, context.new_stream()?);
    let mut read = (0..rounds).map(|_| main.alloc_zeros::<usize>(N)).collect::<Result<Vec<_>, _>>()?;
    let (mut buffers, mut released) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        buffers.push(main.alloc_zeros::<usize>(N)?);
        released.push(main.record_event(None)?);
    }
    for (round, read) in read.iter_mut().enumerate() {
        let slot = round % 2;
        side.wait(&released[slot])?;
        side.memcpy_htod(&[round; N], &mut buffers[slot])?;
        let filled = side.record_event(None)?;
        for _ in 0..waits {
            main.wait(&filled)?;
        }
        main.memcpy_dtod(&buffers[slot], read)?;
        released[slot] = main.record_event(None)?;
    }
    let read = read.iter().map(|values| main.clone_dtoh(values)).collect::<Result<Vec<_>, _>>()?;
    context.synchronize()?;
    Ok(read.iter().enumerate().all(|(round, values)| *values == [round; N]))
}

fn steps_not_missed(waits: usize) -> Vec<(Step, u64, bool)> {
    let found = survivors(Of::Device(0), |_: &Session| double_buffered(4, waits).unwrap_or(false));
    found.into_iter().map(|survivor| (survivor.step, survivor.nth, survivor.redundant)).collect()
}

#[test]
fn every_step_that_is_needed_is_missed() {
    // Two records when all begins, and two in each round: nobody waits for the last two releases.
    assert_eq!(steps_not_missed(1), [(Step::Record, 7, false), (Step::Record, 9, false)]);
}

#[test]
fn of_a_wait_that_is_said_twice_either_may_go() {
    let waits = steps_not_missed(2).into_iter().filter(|(step, ..)| *step == Step::Wait).collect::<Vec<_>>();
    // In each round: the one for the release, and twice the one for the values.
    let expected = (0..4).flat_map(|round| [(3 * round + 1, false), (3 * round + 2, true)]);
    assert_eq!(waits, expected.map(|(nth, redundant)| (Step::Wait, nth, redundant)).collect::<Vec<_>>());
}
