//! Collectives of ranks that share a device.
//!
//! A rank's work is what it enqueues on its stream: copies from the other ranks' slices, and sums of them. The ranks'
//! threads meet when they call a collective, not when the device comes to it, so that calls are in step while the device
//! is behind. Each stage ends with an event of every rank's stream, which the streams of all others wait for.

use super::LocalComm;
use super::rendezvous::{Meeting, Payload};
use super::site::Site;
use crate::comm::arguments::same_place;
use crate::comm::call::Call;
use crate::comm::{Accumulate, CommError};
use crate::device::{DeviceStream, Slice, cast};

impl LocalComm {
    /// Enqueues `call` on a device: peers may read `payload` while `work` runs; `from_peers` bytes come from them.
    pub(super) fn enqueue_on_device(
        &self,
        stream: &dyn DeviceStream,
        mut call: Call,
        payload: Payload,
        from_peers: usize,
        work: impl FnOnce(&dyn Site, &mut Meeting) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (op, name) = (call.op, call.to_string());
        call.device = Some(stream.device_name().into());
        let brought = payload.slices.clone();
        let ticket = self.endpoint.ticket(call);
        // A ticket that is dropped tells the peers.
        stream.check_device()?;
        payload.events.lock().push(stream.record());
        let mut meeting = ticket.meet(payload)?;
        let index = self.endpoint.index;
        let done = join(stream, &meeting, index, &name)
            .and_then(|()| work(&Shared(stream), &mut meeting))
            .and_then(|()| Shared(stream).rendezvous(&mut meeting))
            // The peers have read what was brought until here.
            .and_then(|()| stream.note_use(&brought));
        drop(meeting);
        self.endpoint.count(op, from_peers);
        done
    }
}

/// Makes the stream wait for those of the other ranks, as they were when they came to the present stage.
fn join(stream: &dyn DeviceStream, meeting: &Meeting, index: usize, call: &str) -> Result<(), CommError> {
    let stage = meeting.payload(index).events.lock().len() - 1;
    for (peer, arrival) in meeting.arrivals().iter().enumerate().filter(|(peer, _)| *peer != index) {
        let event = arrival.payload.events.lock().get(stage).cloned();
        let Some(event) = event else {
            let (rank, failed) = (meeting.world_rank(index), meeting.world_rank(peer));
            let message = format!("rank {failed} failed on its device in {call}");
            return Err(CommError::RankFailed { rank, failed, message });
        };
        stream.wait(&event)?;
    }
    Ok(())
}

/// A device that the ranks share, by this rank's stream.
struct Shared<'a>(&'a dyn DeviceStream);

impl Site for Shared<'_> {
    unsafe fn copy(&self, source: &Slice, target: &Slice) -> Result<(), CommError> {
        if same_place(source, target) { Ok(()) } else { cast(self.0, source, target) }
    }

    unsafe fn sum_into(
        &self,
        sources: &[Slice],
        target: &Slice,
        scale: f32,
        accumulate: Accumulate,
    ) -> Result<(), CommError> {
        if target.is_empty() {
            return Ok(());
        }
        self.0.sum_ranks(sources, target, scale, accumulate)
    }

    fn rendezvous(&self, meeting: &mut Meeting) -> Result<(), CommError> {
        let index = meeting.index();
        let call = meeting.arrivals()[index].call.to_string();
        meeting.payload(index).events.lock().push(self.0.record());
        meeting.rendezvous();
        join(self.0, meeting, index, &call)
    }
}
