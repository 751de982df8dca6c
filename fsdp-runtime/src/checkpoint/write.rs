//! Writes the file of one rank.

use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::contents::Piece;
use super::disk::Disk;
use super::index::{BLOCK, StoredDtype, StoredFile, StoredPart};
use crate::error::CheckpointError;

/// What a rank has written, for the index.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// None if the rank had nothing to write.
    pub file: Option<StoredFile>,
    /// Section and name of a tensor, and the part of it in the file.
    pub parts: Vec<(String, String, StoredPart)>,
}

/// Writes `pieces` into a new file `name` of `directory`: a safetensors file, each piece a flat tensor of the name
/// `section:name`. The file is on the disk when this returns.
pub(super) fn write(
    disk: &Disk,
    directory: &Path,
    name: &str,
    mut pieces: Vec<Piece>,
    dtype: impl Fn(&Piece) -> StoredDtype,
) -> Result<Manifest, CheckpointError> {
    if pieces.is_empty() {
        return Ok(Manifest::default());
    }
    let path = directory.join(name);
    // Whole elements of every dtype are aligned if the large ones come first.
    pieces.sort_by_key(|piece| std::cmp::Reverse(dtype(piece).size()));
    let mut infos = Vec::with_capacity(pieces.len());
    let mut end = 0;
    for piece in &pieces {
        let (start, dtype) = (end, dtype(piece));
        end += piece.len * dtype.size();
        let (dtype, shape) = (dtype.safetensors(), vec![piece.len]);
        let info = TensorInfo { dtype, shape, data_offsets: (start, end) };
        infos.push((format!("{}:{}", piece.section, piece.name), info));
    }
    let malformed = |reason: String| CheckpointError::Malformed { path: path.clone(), reason };
    let metadata = Metadata::new(None, infos).map_err(|error| malformed(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| malformed(error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();

    let mut file = disk.create(&path)?;
    disk.write(&path, &mut file, &header)?;
    let mut offset = header.len() as u64;
    let mut parts = Vec::with_capacity(pieces.len());
    for piece in pieces {
        // SAFETY: what is held is a copy that is ours alone, or is borrowed until the save is over, by the `Contents` that the
        // caller gave: what writes weights or state borrows it mutably. Nothing that writes it is under way (`settle`).
        let bytes = unsafe { piece.memory.bytes() };
        let mut crc32 = Vec::with_capacity(bytes.len().div_ceil(BLOCK));
        // Blocks are written while they are still in the cache from the checksum.
        for block in bytes.chunks(BLOCK) {
            crc32.push(crc32fast::hash(block));
            disk.write(&path, &mut file, block)?;
        }
        let Piece { section, name, start, len, .. } = piece;
        parts.push((section, name, StoredPart { start, len, file: 0, offset, crc32 }));
        offset += bytes.len() as u64;
    }
    disk.sync(&path, &file)?;
    let file = StoredFile { name: name.to_owned(), bytes: offset, header_crc32: crc32fast::hash(&header) };
    Ok(Manifest { file: Some(file), parts })
}
