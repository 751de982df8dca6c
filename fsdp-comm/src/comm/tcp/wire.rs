//! The messages: frames of a JSON header and a body of bytes.
//!
//! The frames are made by hand: crates that frame messages are asynchronous, or have one limit for headers and bodies.

use std::io::{Error, ErrorKind, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::comm::call::{Call, Notes, Op, Part, Side};
use crate::comm::ledger::{Stage, Trouble};
use crate::comm::{Accumulate, CommError, HostOp, Phase, Tag};
use crate::spec::Dtype;

/// Of the messages below; both sides must speak the same.
pub(super) const VERSION: u32 = 4;
/// First bytes of a frame: whoever sends others is no rank.
pub(super) const MAGIC: [u8; 4] = *b"FSDP";
/// Bytes of a header at most: a group names its ranks in one.
const MAX_HEADER: u64 = 1 << 20;
/// Bytes of a rank's body at most: what it brings into a collective of the host, a buffer of a model for instance.
const MAX_REQUEST: u64 = 256 << 20;
/// Bytes of rank 0's body at most: what all ranks have brought.
const MAX_ANSWER: u64 = 1 << 32;

/// What is sent in one direction.
pub(super) trait Message: Serialize + DeserializeOwned {
    /// Bytes of a body at most.
    const MAX_BODY: u64;
}

impl Message for Request {
    const MAX_BODY: u64 = MAX_REQUEST;
}

impl Message for Answer {
    const MAX_BODY: u64 = MAX_ANSWER;
}

/// From a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// A collective of the host, whose values are the body. It is answered, and until then the rank's own thread, if it
    /// has called it, does nothing else.
    Host { id: u64, comm: u64, tag: WireTag, op: Host, by_own_thread: bool },
    /// The communicator `new`, made of another: of some of its ranks, of all, or of all and without their notes.
    Make { comm: u64, new: u64, name: String, ranks: Option<Vec<usize>>, apart: bool },
    /// A note on a communicator.
    Note { comm: u64, state: String },
    /// A collective of devices is called.
    Enter { comm: u64, call: WireCall },
    /// The rank's device has come to it, or is done.
    Reached { comm: u64, number: u64, stage: Stage },
    /// The rank gives up. It is answered, with the failure.
    GiveUp { id: u64, comm: u64, number: Option<u64>, trouble: Trouble },
    /// The rank has returned.
    Finish,
    /// The rank has failed.
    Fail { how: String },
    /// The rank is alive.
    Ping,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Host {
    Barrier,
    Reduce(HostOp),
    Gather,
    /// One without a time-out.
    PatientGather,
}

/// To a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It has its place.
    Welcome,
    /// It has not.
    Refused { message: String },
    /// A request is done; the body holds parts of these lengths.
    Done { id: u64, lengths: Vec<u64> },
    /// A request has failed.
    Failed { id: u64, error: CommError },
    /// The world has failed.
    Failure { error: CommError },
    /// Rank 0 is alive.
    Ping,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireTag {
    unit: String,
    phase: Phase,
    step: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireCall {
    op: Op,
    tag: WireTag,
    bytes: usize,
    device: Option<String>,
    parts: Vec<WirePart>,
}

#[derive(Debug, Serialize, Deserialize)]
struct WirePart {
    send: (usize, String),
    recv: (usize, String),
    /// Bits of the scale, and whether it is added.
    reduction: Option<(u32, bool)>,
}

impl From<Tag> for WireTag {
    fn from(Tag { unit, phase, step }: Tag) -> WireTag {
        WireTag { unit: unit.to_string(), phase, step }
    }
}

impl From<WireTag> for Tag {
    fn from(WireTag { unit, phase, step }: WireTag) -> Tag {
        Tag { unit: unit.into(), phase, step }
    }
}

impl From<Call> for WireCall {
    fn from(call: Call) -> WireCall {
        let side = |side: Side| (side.elements, side.dtype.to_owned());
        let part = |part: Part| WirePart {
            send: side(part.send),
            recv: side(part.recv),
            reduction: part.reduction.map(|(scale, acc)| (scale.to_bits(), acc == Accumulate::Add)),
        };
        WireCall {
            op: call.op,
            tag: call.tag.into(),
            bytes: call.bytes,
            device: call.device.map(|device| device.to_string()),
            parts: call.parts.into_iter().map(part).collect(),
        }
    }
}

impl WireCall {
    /// The call, if its dtypes are known.
    pub(super) fn call(self) -> Option<Call> {
        let side = |(elements, dtype): (usize, String)| {
            let known = [Dtype::F32, Dtype::BF16, Dtype::F16].map(Dtype::name);
            let dtype = known.into_iter().find(|known| **known == dtype)?;
            Some(Side { elements, dtype })
        };
        let part = |part: WirePart| {
            let accumulate = |add| if add { Accumulate::Add } else { Accumulate::Overwrite };
            let reduction = part.reduction.map(|(bits, add)| (f32::from_bits(bits), accumulate(add)));
            Some(Part { send: side(part.send)?, recv: side(part.recv)?, reduction })
        };
        Some(Call {
            op: self.op,
            tag: self.tag.into(),
            bytes: self.bytes,
            notes: Notes::new(),
            device: self.device.map(Into::into),
            patient: false,
            parts: self.parts.into_iter().map(part).collect::<Option<_>>()?,
        })
    }
}

/// Writes a frame.
pub(super) fn write<T: Message>(to: &mut impl Write, header: &T, body: &[u8]) -> Result<(), Error> {
    let header = serde_json::to_vec(header)?;
    let (header_len, body_len) = (header.len() as u64, body.len() as u64);
    if header_len > MAX_HEADER || body_len > T::MAX_BODY {
        let message = format!(
            "a message of {header_len} + {body_len} bytes is too long: {MAX_HEADER} + {} are the most",
            T::MAX_BODY
        );
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let mut frame = Vec::with_capacity(20 + header.len());
    frame.extend(MAGIC);
    frame.extend(header_len.to_le_bytes());
    frame.extend(body_len.to_le_bytes());
    frame.extend(header);
    to.write_all(&frame)?;
    to.write_all(body)
}

/// Reads a frame; memory grows with what arrives, not with what is announced.
///
/// # Errors
/// Those of reading; [`ErrorKind::InvalidData`] if it is no frame.
pub(super) fn read<T: Message>(from: &mut impl Read) -> Result<(T, Vec<u8>), Error> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidData, message);
    let mut start = [0; 20];
    from.read_exact(&mut start)?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| start[at + i]));
    let (header_len, body_len) = (number(4), number(12));
    if start[..4] != MAGIC || header_len > MAX_HEADER || body_len > T::MAX_BODY {
        return Err(invalid("not a message of a rank".to_owned()));
    }
    let mut take = |len: u64| {
        let mut bytes = Vec::new();
        match from.take(len).read_to_end(&mut bytes)? as u64 == len {
            true => Ok(bytes),
            false => Err(Error::from(ErrorKind::UnexpectedEof)),
        }
    };
    let (header, body) = (take(header_len)?, take(body_len)?);
    let header = serde_json::from_slice(&header);
    Ok((header.map_err(|error| invalid(format!("a message that is not understood: {error}")))?, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(header: &[u8], header_len: u64, body_len: u64) -> Vec<u8> {
        [&MAGIC[..], &header_len.to_le_bytes(), &body_len.to_le_bytes(), header].concat()
    }

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Request::Fail { how: "panicked".into() }, &[1, 2, 3]).unwrap();
        let (request, body) = read::<Request>(&mut &bytes[..]).unwrap();
        assert!(matches!(request, Request::Fail { how } if how == "panicked"));
        assert_eq!(body, [1, 2, 3]);
        for len in 0..bytes.len() {
            let error = read::<Request>(&mut &bytes[..len]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn garbage_is_refused_before_memory_is_taken_for_it() {
        let cases = [
            b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n".to_vec(),
            frame(b"", MAX_HEADER + 1, 0),
            frame(b"", 0, u64::MAX),
            frame(b"", 0, MAX_REQUEST + 1),
            frame(b"{}", 2, 0),
            frame(b"\xff\xfe", 2, 0),
            frame(b"\"Nothing\"", 9, 0),
        ];
        for bytes in cases {
            let error = read::<Request>(&mut &bytes[..]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{bytes:?}");
        }
    }

    #[test]
    fn a_call_comes_as_it_was() {
        let side = |elements, dtype| Side { elements, dtype };
        let call = Call {
            op: Op::Broadcast { root: 3 },
            tag: Tag { unit: "layers.1".into(), phase: Phase::Backward, step: 7 },
            bytes: 12,
            notes: Notes::new(),
            device: Some("NCCL".into()),
            patient: false,
            parts: vec![Part {
                send: side(6, "bf16"),
                recv: side(3, "f32"),
                reduction: Some((f32::NAN, Accumulate::Add)),
            }],
        };
        let header = serde_json::to_string(&WireCall::from(call.clone())).unwrap();
        let there = serde_json::from_str::<WireCall>(&header).unwrap().call().unwrap();
        assert!(there.agrees_with(&call) && there.bytes == call.bytes);
        let unknown = header.replace("bf16", "bf17");
        assert!(serde_json::from_str::<WireCall>(&unknown).unwrap().call().is_none());
    }
}
