//! A rank's handle on the mesh: the arrangement of the ranks, with their communicators.

use std::fmt;
use std::sync::Arc;

use super::local::{LocalOptions, LocalWorld};
use super::{CommError, Communicator};
use crate::Error;
use crate::device::{Backend, CpuBackend};
use crate::mesh::{MeshDim, MeshError, Topology};
use crate::sync::Mutex;

/// The ranks of the world along named dims, seen from one of them. Cheap to clone.
#[derive(Clone)]
pub struct DeviceMesh {
    topology: Topology,
    communicator: Arc<dyn Communicator>,
    backend: Arc<dyn Backend>,
    /// Groups that were asked for, by their dims in the order of the mesh.
    groups: Arc<Mutex<Groups>>,
}

type Groups = Vec<(Vec<MeshDim>, Arc<dyn Communicator>)>;

impl DeviceMesh {
    /// Arranges the ranks of `communicator` along `dims`, outermost first; the last one runs fastest. Known
    /// dims are `dp_outer`, `dp_shard`, `cp`, `tp` and `ep`. Nothing is sent; every rank should give the same
    /// dims.
    ///
    /// # Errors
    /// As for [`Topology::new`].
    pub fn new(dims: &[(&str, usize)], communicator: Arc<dyn Communicator>) -> Result<DeviceMesh, MeshError> {
        let topology = Topology::new(dims, communicator.size())?;
        Ok(DeviceMesh { topology, communicator, backend: Arc::new(CpuBackend), groups: Arc::default() })
    }

    /// The mesh of a single rank, the calling thread: no launch is needed.
    ///
    /// ```
    /// let mesh = fsdp_comm::comm::DeviceMesh::single();
    /// assert_eq!((mesh.rank(), mesh.world_size()), (0, 1));
    /// ```
    pub fn single() -> DeviceMesh {
        let world = LocalWorld::new(1, LocalOptions::default());
        let communicator = world.communicator(0).expect("a world of one rank has rank 0");
        DeviceMesh::new(&[("dp_shard", 1)], communicator).expect("one rank is a mesh of one rank")
    }

    /// A mesh of these ranks that computes on `backend`; `communicator` joins them there: its collectives take the streams of the
    /// backend. Nothing is sent.
    ///
    /// # Errors
    /// If the communicator has another number of ranks.
    pub fn on_backend(
        &self,
        backend: Arc<dyn Backend>,
        communicator: Arc<dyn Communicator>,
    ) -> Result<DeviceMesh, MeshError> {
        let dims: Vec<(&str, usize)> =
            self.topology.dims().iter().map(|(dim, size)| (dim.name(), *size)).collect();
        let topology = Topology::new(&dims, communicator.size())?;
        Ok(DeviceMesh { topology, communicator, backend, groups: Arc::default() })
    }

    /// What this rank computes on: models that are sharded over the mesh are there.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The arrangement.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The communicator of all ranks of the mesh.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// The communicator of the ranks that differ from this one along `dims` only, flattened into one group in
    /// the order of the mesh; this rank alone if all have size 1. It is made once: clones of the mesh share it.
    ///
    /// Every rank of the mesh must call it, in the same order.
    ///
    /// # Errors
    /// Those of [`Communicator::split`].
    ///
    /// ```
    /// # use fsdp_comm::mesh::MeshDim;
    /// let sizes = fsdp_comm::launch::local(6, |world| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
    ///     let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 3)])?;
    ///     Ok((mesh.group(&[MeshDim::DpShard])?.size(), mesh.group(&[MeshDim::DpOuter])?.rank()))
    /// })?;
    /// assert_eq!(sizes, [(3, 0), (3, 0), (3, 0), (3, 1), (3, 1), (3, 1)]);
    /// # Ok::<(), fsdp_comm::launch::LaunchError>(())
    /// ```
    pub fn group(&self, dims: &[MeshDim]) -> Result<Arc<dyn Communicator>, CommError> {
        let larger = self.topology.dims().iter().filter(|(dim, size)| *size > 1 && dims.contains(dim));
        let key: Vec<MeshDim> = larger.map(|(dim, _)| *dim).collect();
        let mut groups = self.groups.lock();
        if let Some((_, group)) = groups.iter().find(|(dims, _)| *dims == key) {
            return Ok(group.clone());
        }
        let ranks = self.topology.flattened(self.rank(), &key).expect("this rank is one of the mesh");
        let names: Vec<&str> = key.iter().map(|dim| dim.name()).collect();
        let name = if names.is_empty() { "self".to_owned() } else { names.join("_") };
        let group = self.communicator.split(&name, &ranks)?;
        groups.push((key, group.clone()));
        Ok(group)
    }

    /// The mesh of the ranks that differ from this one along `dims` only.
    ///
    /// Every rank of the mesh must call it, in the same order.
    ///
    /// # Errors
    /// If a name is unknown, or the mesh has none of the dims; those of [`Communicator::split`].
    pub fn sub_mesh(&self, dims: &[&str]) -> Result<DeviceMesh, Error> {
        let named: Vec<MeshDim> = dims.iter().map(|dim| dim.parse()).collect::<Result<_, MeshError>>()?;
        let topology = self.topology.sub(&named)?;
        let communicator = self.group(&named)?;
        Ok(DeviceMesh { topology, communicator, backend: self.backend.clone(), groups: Arc::default() })
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
