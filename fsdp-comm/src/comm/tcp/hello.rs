//! The first words of a connection, of fixed lengths: each side shows that it knows the run's secret.
//!
//! | from | bytes |
//! |---|---|
//! | rank | `FSDP`, version (4), its number (16) |
//! | rank 0 | `FSDP`, version (4), its number (16), its proof (32) |
//! | rank | rank (4), size (4), its proof (32) |
//!
//! Then rank 0 answers with a frame ([`wire`](super::wire)): the rank is welcome, or is refused with a reason. Of an unknown
//! connection rank 0 reads 64 bytes, within [`WITHIN`].

use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::secret::{Nonce, Proof, Secret, Side, nonce};
use super::wire::{MAGIC, VERSION};

/// How long a connection may take to say who it is, over all.
pub(super) const WITHIN: Duration = Duration::from_secs(5);

/// Who a connection says, and has shown, that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) size: usize,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, message.into())
}

/// Says hello to rank 0.
///
/// # Errors
/// Those of the connection; [`ErrorKind::InvalidData`], in words, if rank 0 is no rank 0 of this run.
pub(super) fn say(stream: &mut TcpStream, secret: &Secret, hello: Hello) -> Result<(), Error> {
    let own = nonce()?;
    stream.write_all(&opening(own))?;
    let mut bytes = [0; 24];
    stream.read_exact(&mut bytes)?;
    let other = open(bytes).map_err(|theirs| match theirs {
        Some(theirs) => invalid(format!("it speaks version {theirs}, this rank version {VERSION}")),
        None => invalid("it is no rank 0"),
    })?;
    let mut proof = Proof::default();
    stream.read_exact(&mut proof)?;
    if !secret.accepts(&proof, Side::Server, other, own) {
        return Err(invalid("it does not know the secret of this rank: give all ranks the same FSDP_TOKEN"));
    }
    let (rank, size) = (hello.rank as u32, hello.size as u32);
    let proof = secret.proof(Side::Rank { rank, size }, own, other);
    stream.write_all(&[&rank.to_le_bytes()[..], &size.to_le_bytes(), &proof].concat())
}

/// Hears a hello, in rank 0.
///
/// # Errors
/// Those of the connection; [`ErrorKind::TimedOut`] if it takes too long, [`ErrorKind::InvalidData`] if it is none of
/// someone who knows the secret.
pub(super) fn hear(stream: &mut TcpStream, secret: &Secret) -> Result<Hello, Error> {
    let deadline = Instant::now() + WITHIN;
    stream.set_write_timeout(Some(WITHIN))?;
    let mut bytes = [0; 24];
    read_by(stream, &mut bytes, deadline)?;
    let own = nonce()?;
    let opened = open(bytes);
    // Whoever speaks another version is told which one this is.
    let other = opened.unwrap_or_default();
    let proof = secret.proof(Side::Server, own, other);
    if !matches!(opened, Err(None)) {
        stream.write_all(&[&opening(own)[..], &proof].concat())?;
    }
    opened.map_err(|_| invalid("not a hello of a rank"))?;
    let mut bytes = [0; 40];
    read_by(stream, &mut bytes, deadline)?;
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let (rank, size) = (number(0), number(4));
    let proof: Proof = std::array::from_fn(|i| bytes[8 + i]);
    if !secret.accepts(&proof, Side::Rank { rank, size }, other, own) {
        return Err(invalid("it does not know the secret"));
    }
    Ok(Hello { rank: rank as usize, size: size as usize })
}

fn opening(nonce: Nonce) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..].copy_from_slice(&nonce);
    bytes
}

/// The number of an opening; else the version of another one.
fn open(bytes: [u8; 24]) -> Result<Nonce, Option<u32>> {
    if bytes[..4] != MAGIC {
        return Err(None);
    }
    match u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])) {
        VERSION => Ok(std::array::from_fn(|i| bytes[8 + i])),
        other => Err(Some(other)),
    }
}

/// Reads all of `bytes` until `deadline`, however they come.
fn read_by(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> Result<(), Error> {
    let mut read = 0;
    while read < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[read..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(more) => read += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
