//! A number that each rank has, averaged over them.

use crate::comm::{HostOp, Phase};
use crate::engine::Fsdp;
use crate::error::Result;

impl<M> Fsdp<M> {
    /// The mean of `value` over all ranks of the mesh, the same on each of them: of the loss of a step, for whoever prints
    /// it. Where ranks have different numbers of tokens, it is not the mean over tokens.
    ///
    /// Every rank must call it.
    ///
    /// ```
    /// use fsdp_runtime::{FullyShard, Param, launch};
    ///
    /// launch::local(2, |world| -> fsdp_runtime::Result<()> {
    ///     let model = Param::new(3).fully_shard(&world.data_parallel_mesh())?;
    ///     let loss = if world.rank() == 0 { 1.0 } else { 4.0 };
    ///     assert_eq!(model.mean_over_ranks(loss)?, 2.5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    /// Those of the exchange between ranks.
    pub fn mean_over_ranks(&self, value: f64) -> Result<f64> {
        let engine = self.engine();
        let mut sum = [value];
        let ctx = &engine.ctx;
        ctx.host_reduce(&mut engine.step(), ("mean over ranks", Phase::Setup), HostOp::Sum, &mut sum)?;
        Ok(sum[0] / ctx.comm.size() as f64)
    }
}
