//! The runtime's errors, as far as the modules under test make them.

use crate::comm::CommError;
use crate::mesh::MeshError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("configuration: {0}")]
    Config(String),
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

pub type Result<T> = std::result::Result<T, Error>;
