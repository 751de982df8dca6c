use fsdp::prelude::*;

fn main() {
    let sharded = fsdp::launch::local(2, |world| {
        Param::new(8).fully_shard(&world.data_parallel_mesh())?;
        Ok(())
    });
    sharded.unwrap();
}
