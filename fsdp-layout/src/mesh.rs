//! The mesh: ranks arranged along named dims. Pure arithmetic; a `DeviceMesh` joins it with a communicator.
//!
//! Ranks are laid out in row-major order: the last dim runs fastest. With `dp_outer = 2, dp_shard = 3` rank 4
//! has the coordinate `(1, 1)`, and its group along `dp_shard` is the ranks 3, 4, 5.

use std::fmt;
use std::str::FromStr;

/// Name of a mesh dim: what its ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MeshDim {
    /// Replicas of the sharded model (HSDP).
    DpOuter,
    /// Shards of the training state.
    DpShard,
    /// Context parallelism: parts of the sequence.
    Cp,
    /// Tensor parallelism: parts of the matrices.
    Tp,
    /// Expert parallelism: parts of the set of experts.
    Ep,
}

impl MeshDim {
    /// All known dims, outermost first in the usual order.
    pub const ALL: [MeshDim; 5] = [MeshDim::DpOuter, MeshDim::DpShard, MeshDim::Cp, MeshDim::Tp, MeshDim::Ep];

    /// The spelling in options and errors: `dp_outer`, `dp_shard`, `cp`, `tp`, `ep`.
    pub const fn name(self) -> &'static str {
        match self {
            MeshDim::DpOuter => "dp_outer",
            MeshDim::DpShard => "dp_shard",
            MeshDim::Cp => "cp",
            MeshDim::Tp => "tp",
            MeshDim::Ep => "ep",
        }
    }
}

impl fmt::Display for MeshDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MeshDim {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        let known = MeshDim::ALL.into_iter().find(|dim| dim.name() == text);
        known.ok_or_else(|| MeshError::UnknownDim { name: text.to_owned() })
    }
}

/// Why ranks cannot be arranged as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The sizes do not multiply to the number of ranks.
    #[error("mesh {mesh} needs {needed} ranks, the world has {world}")]
    WorldSize {
        /// The dims and sizes that were asked for.
        mesh: String,
        /// Their product.
        needed: usize,
        /// The number of ranks there are.
        world: usize,
    },
    /// The product of the sizes overflows.
    #[error("mesh {mesh} needs more ranks than can be counted")]
    TooLarge {
        /// The dims and sizes that were asked for.
        mesh: String,
    },
    /// A mesh has at least one dim.
    #[error("the mesh has no dim: give one at least, `dp_shard` for instance")]
    NoDims,
    /// A dim has at least one rank.
    #[error("mesh dim `{dim}` has size 0: leave it out, or give it size 1")]
    ZeroSize {
        /// The dim.
        dim: MeshDim,
    },
    /// A dim was named twice.
    #[error("mesh dim `{dim}` is named twice")]
    DuplicateDim {
        /// The dim.
        dim: MeshDim,
    },
    /// No dim has this name.
    #[error("unknown mesh dim `{name}`: expected dp_outer, dp_shard, cp, tp or ep")]
    UnknownDim {
        /// What was given.
        name: String,
    },
    /// No such rank.
    #[error("mesh {mesh} has no rank {rank}")]
    NoSuchRank {
        /// The dims and sizes of the mesh.
        mesh: String,
        /// What was given.
        rank: usize,
    },
    /// A coordinate outside of the mesh.
    #[error("mesh {mesh} has no coordinate {coordinate:?}")]
    NoSuchCoordinate {
        /// The dims and sizes of the mesh.
        mesh: String,
        /// What was given.
        coordinate: Vec<usize>,
    },
}

/// Named dims with their sizes, outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    dims: Vec<(MeshDim, usize)>,
}

impl Topology {
    /// Arranges `world` ranks along `dims`, outermost first; the last one runs fastest.
    ///
    /// # Errors
    /// If a name is unknown or comes twice, a size is zero, or the product of the sizes is not `world`.
    ///
    /// ```
    /// use fsdp_layout::mesh::{MeshDim, Topology};
    ///
    /// let mesh = Topology::new(&[("dp_outer", 2), ("dp_shard", 3)], 6)?;
    /// assert_eq!(mesh.coordinate(4)?, [1, 1]);
    /// assert_eq!(mesh.group(4, MeshDim::DpShard)?, [3, 4, 5]);
    /// assert_eq!(mesh.group(4, MeshDim::DpOuter)?, [1, 4]);
    /// # Ok::<(), fsdp_layout::mesh::MeshError>(())
    /// ```
    pub fn new(dims: &[(&str, usize)], world: usize) -> Result<Topology, MeshError> {
        let mut named: Vec<(MeshDim, usize)> = Vec::with_capacity(dims.len());
        for (name, size) in dims {
            let dim: MeshDim = name.parse()?;
            if *size == 0 {
                return Err(MeshError::ZeroSize { dim });
            }
            if named.iter().any(|(other, _)| *other == dim) {
                return Err(MeshError::DuplicateDim { dim });
            }
            named.push((dim, *size));
        }
        if named.is_empty() {
            return Err(MeshError::NoDims);
        }
        let topology = Topology { dims: named };
        let product = topology.dims.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size));
        match product {
            None => Err(MeshError::TooLarge { mesh: topology.to_string() }),
            Some(needed) if needed != world => {
                Err(MeshError::WorldSize { mesh: topology.to_string(), needed, world })
            }
            Some(_) => Ok(topology),
        }
    }

    /// The dims with their sizes, outermost first.
    pub fn dims(&self) -> &[(MeshDim, usize)] {
        &self.dims
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.dims.iter().map(|(_, size)| size).product()
    }

    /// Number of ranks along `dim`: 1 if the mesh does not have it.
    pub fn size(&self, dim: MeshDim) -> usize {
        self.dims.iter().find(|(name, _)| *name == dim).map_or(1, |(_, size)| *size)
    }

    /// The coordinate of `rank`, in the order of the dims.
    ///
    /// # Errors
    /// [`MeshError::NoSuchRank`].
    pub fn coordinate(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        if rank >= self.world_size() {
            return Err(MeshError::NoSuchRank { mesh: self.to_string(), rank });
        }
        let mut rest = rank;
        let mut coordinate: Vec<usize> = (self.dims.iter().rev())
            .map(|(_, size)| {
                let index = rest % size;
                rest /= size;
                index
            })
            .collect();
        coordinate.reverse();
        Ok(coordinate)
    }

    /// The index of `rank` along `dim`: 0 if the mesh does not have it.
    ///
    /// # Errors
    /// [`MeshError::NoSuchRank`].
    pub fn index(&self, rank: usize, dim: MeshDim) -> Result<usize, MeshError> {
        let coordinate = self.coordinate(rank)?;
        let at = self.dims.iter().position(|(name, _)| *name == dim);
        Ok(at.map_or(0, |at| coordinate[at]))
    }

    /// The rank at `coordinate`, given in the order of the dims.
    ///
    /// # Errors
    /// [`MeshError::NoSuchCoordinate`] if it has another number of dims, or lies outside of one.
    pub fn rank(&self, coordinate: &[usize]) -> Result<usize, MeshError> {
        let inside = coordinate.len() == self.dims.len()
            && coordinate.iter().zip(&self.dims).all(|(index, (_, size))| index < size);
        if !inside {
            let coordinate = coordinate.to_vec();
            return Err(MeshError::NoSuchCoordinate { mesh: self.to_string(), coordinate });
        }
        Ok(coordinate.iter().zip(&self.dims).fold(0, |rank, (index, (_, size))| rank * size + index))
    }

    /// The ranks that differ from `rank` along `dim` only, itself included, by their index along it. The rank
    /// alone if the mesh does not have the dim.
    ///
    /// # Errors
    /// [`MeshError::NoSuchRank`].
    pub fn group(&self, rank: usize, dim: MeshDim) -> Result<Vec<usize>, MeshError> {
        self.flattened(rank, &[dim])
    }

    /// The ranks that differ from `rank` along some of `dims` only, itself included, in ascending order: the
    /// group of those dims flattened into one, in the order in which the mesh has them. Dims that the mesh
    /// does not have do not matter.
    ///
    /// # Errors
    /// [`MeshError::NoSuchRank`].
    ///
    /// ```
    /// use fsdp_layout::mesh::{MeshDim, Topology};
    ///
    /// let mesh = Topology::new(&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 8)?;
    /// assert_eq!(mesh.flattened(3, &[MeshDim::Cp, MeshDim::DpShard])?, [1, 3, 5, 7]);
    /// # Ok::<(), fsdp_layout::mesh::MeshError>(())
    /// ```
    pub fn flattened(&self, rank: usize, dims: &[MeshDim]) -> Result<Vec<usize>, MeshError> {
        let own = self.coordinate(rank)?;
        let along = |other: &usize| {
            let other = self.coordinate(*other).unwrap_or_default();
            let mut all = self.dims.iter().zip(own.iter().zip(&other));
            all.all(|((dim, _), (own, other))| own == other || dims.contains(dim))
        };
        Ok((0..self.world_size()).filter(along).collect())
    }

    /// The arrangement of such a group: `dims` in the order in which the mesh has them.
    ///
    /// # Errors
    /// [`MeshError::NoDims`] if the mesh has none of them.
    pub fn sub(&self, dims: &[MeshDim]) -> Result<Topology, MeshError> {
        let dims: Vec<_> = self.dims.iter().filter(|(dim, _)| dims.contains(dim)).copied().collect();
        if dims.is_empty() { Err(MeshError::NoDims) } else { Ok(Topology { dims }) }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (dim, size)) in self.dims.iter().enumerate() {
            let separator = if i == 0 { "" } else { " x " };
            write!(f, "{separator}{dim}={size}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(dims: &[(&str, usize)], world: usize) -> String {
        Topology::new(dims, world).unwrap_err().to_string()
    }

    #[test]
    fn a_mesh_must_fit_the_world() {
        assert_eq!(
            error(&[("dp_outer", 3), ("dp_shard", 2)], 4),
            "mesh dp_outer=3 x dp_shard=2 needs 6 ranks, the world has 4"
        );
        assert_eq!(error(&[("dp_shard", 2)], 1), "mesh dp_shard=2 needs 2 ranks, the world has 1");
        assert_eq!(
            error(&[("dp_shard", usize::MAX), ("tp", 2)], 4),
            format!("mesh dp_shard={} x tp=2 needs more ranks than can be counted", usize::MAX)
        );
    }

    #[test]
    fn bad_dims_are_named() {
        assert_eq!(
            error(&[("dp_shard", 0)], 0),
            "mesh dim `dp_shard` has size 0: leave it out, or give it size 1"
        );
        assert_eq!(error(&[("tp", 1), ("tp", 2)], 2), "mesh dim `tp` is named twice");
        assert_eq!(
            error(&[("pp", 2)], 2),
            "unknown mesh dim `pp`: expected dp_outer, dp_shard, cp, tp or ep"
        );
        assert_eq!(error(&[], 1), "the mesh has no dim: give one at least, `dp_shard` for instance");
    }

    #[test]
    fn the_last_dim_runs_fastest() {
        let mesh = Topology::new(&[("dp_outer", 2), ("dp_shard", 3), ("tp", 2)], 12).unwrap();
        assert_eq!(mesh.coordinate(0).unwrap(), [0, 0, 0]);
        assert_eq!(mesh.coordinate(1).unwrap(), [0, 0, 1]);
        assert_eq!(mesh.coordinate(7).unwrap(), [1, 0, 1]);
        assert_eq!(mesh.coordinate(11).unwrap(), [1, 2, 1]);
        for rank in 0..12 {
            assert_eq!(mesh.rank(&mesh.coordinate(rank).unwrap()).unwrap(), rank);
        }
        assert_eq!((mesh.size(MeshDim::DpShard), mesh.size(MeshDim::Cp)), (3, 1));
        assert_eq!((mesh.index(9, MeshDim::DpShard).unwrap(), mesh.index(9, MeshDim::Cp).unwrap()), (1, 0));
    }

    #[test]
    fn groups_differ_along_their_dim_only() {
        let mesh = Topology::new(&[("dp_outer", 2), ("dp_shard", 3), ("tp", 2)], 12).unwrap();
        assert_eq!(mesh.group(9, MeshDim::DpOuter).unwrap(), [3, 9]);
        assert_eq!(mesh.group(9, MeshDim::DpShard).unwrap(), [7, 9, 11]);
        assert_eq!(mesh.group(9, MeshDim::Tp).unwrap(), [8, 9]);
        assert_eq!(mesh.group(9, MeshDim::Cp).unwrap(), [9]);
        for (dim, size) in mesh.dims().to_vec() {
            let mut seen: Vec<usize> = Vec::new();
            for rank in 0..12 {
                let group = mesh.group(rank, dim).unwrap();
                assert_eq!(group.len(), size);
                assert_eq!(group[mesh.index(rank, dim).unwrap()], rank);
                if group[0] == rank {
                    seen.extend(group);
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..12).collect::<Vec<_>>());
        }
    }

    #[test]
    fn ranks_and_coordinates_outside_are_errors() {
        let mesh = Topology::new(&[("dp_shard", 4)], 4).unwrap();
        assert_eq!(mesh.coordinate(4).unwrap_err().to_string(), "mesh dp_shard=4 has no rank 4");
        assert_eq!(mesh.rank(&[4]).unwrap_err().to_string(), "mesh dp_shard=4 has no coordinate [4]");
        assert_eq!(mesh.rank(&[0, 0]).unwrap_err().to_string(), "mesh dp_shard=4 has no coordinate [0, 0]");
    }
}
