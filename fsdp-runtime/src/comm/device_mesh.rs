//! A rank's handle on the mesh: the arrangement of the ranks, and the communicator that joins them.

use std::fmt;
use std::sync::Arc;

use super::Communicator;
use super::local::{LocalOptions, LocalWorld};
use crate::mesh::{MeshDim, MeshError, Topology};

/// The ranks of the world along named dims, seen from one of them. Cheap to clone.
#[derive(Clone)]
pub struct DeviceMesh {
    topology: Topology,
    communicator: Arc<dyn Communicator>,
}

impl DeviceMesh {
    /// Arranges the ranks of `communicator` along `dims`, outermost first; the last one runs fastest. Known
    /// dims are `dp_outer`, `dp_shard`, `cp`, `tp` and `ep`. Nothing is sent; every rank should give the same
    /// dims.
    ///
    /// # Errors
    /// As for [`Topology::new`].
    pub fn new(dims: &[(&str, usize)], communicator: Arc<dyn Communicator>) -> Result<DeviceMesh, MeshError> {
        let topology = Topology::new(dims, communicator.size())?;
        Ok(DeviceMesh { topology, communicator })
    }

    /// The mesh of a single rank, the calling thread: no launch is needed.
    ///
    /// ```
    /// let mesh = fsdp_runtime::comm::DeviceMesh::single();
    /// assert_eq!((mesh.rank(), mesh.world_size()), (0, 1));
    /// ```
    pub fn single() -> DeviceMesh {
        let world = LocalWorld::new(1, LocalOptions::default());
        let communicator = world.communicator(0).expect("a world of one rank has rank 0");
        DeviceMesh::new(&[("dp_shard", 1)], communicator).expect("one rank is a mesh of one rank")
    }

    /// The arrangement.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The communicator of all ranks of the mesh.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks of the mesh.
    pub fn world_size(&self) -> usize {
        self.communicator.size()
    }

    /// Number of ranks along `dim`: 1 if the mesh does not have it.
    pub fn size(&self, dim: MeshDim) -> usize {
        self.topology.size(dim)
    }

    /// This rank's index along `dim`: 0 if the mesh does not have it.
    pub fn index(&self, dim: MeshDim) -> usize {
        self.topology.index(self.rank(), dim).expect("the topology has as many ranks as the communicator")
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMesh({}, rank {} of {})", self.topology, self.rank(), self.world_size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_rank_needs_no_launch() {
        let mesh = DeviceMesh::single();
        assert_eq!((mesh.size(MeshDim::DpShard), mesh.index(MeshDim::DpShard)), (1, 0));
        assert_eq!(format!("{mesh:?}"), "DeviceMesh(dp_shard=1, rank 0 of 1)");
    }

    #[test]
    fn the_mesh_must_fit_the_communicator() {
        let communicator = DeviceMesh::single().communicator().clone();
        let error = DeviceMesh::new(&[("dp_shard", 2)], communicator).unwrap_err();
        assert_eq!(error.to_string(), "mesh dp_shard=2 needs 2 ranks, the world has 1");
    }
}
