//! What a resumed run has besides its weights: buffers, the step and seed of its random numbers, an average's warm-up.

use std::path::Path;
use std::sync::Mutex;

use candle_core::{Device, Tensor};
use fsdp::checkpoint::{Checkpoints, Contents, Restore};
use fsdp::launch::World;
use fsdp::prelude::*;
use fsdp_test_support::{assert_each_close, relative};

use crate::model::Net;

/// Numbers of ranks to save and to restore on.
const WAYS: [(usize, usize); 4] = [(1, 1), (1, 3), (2, 1), (3, 2)];

#[test]
fn buffers_come_back_at_any_other_number_of_ranks() {
    for (save, load) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        launch::local(save, |world| -> fsdp::Result<()> {
            let counts = Tensor::new(&[70u32, 80, u32::MAX], &Device::Cpu)?;
            let mean = Tensor::new(&[[f64::MIN_POSITIVE, 2.5]], &Device::Cpu)?;
            let model = Net { counts, mean, ..Net::new(2) }.fully_shard(&world.data_parallel_mesh())?;
            Checkpoints::new(dir.path()).save(Contents::of(&model)).map(drop)
        })
        .unwrap();
        launch::local(load, |world| -> fsdp::Result<()> {
            let mut model = Net::new(2).fully_shard(&world.data_parallel_mesh())?;
            assert_eq!(model.module().counts.to_vec1::<u32>()?, [1, 2, 3]);
            Checkpoints::new(dir.path()).restore_latest(Restore::new(&mut model))?.unwrap();
            assert_eq!(model.module().counts.to_vec1::<u32>()?, [70, 80, u32::MAX], "{save}, {load}");
            assert_eq!(model.module().mean.to_vec2::<f64>()?, [[f64::MIN_POSITIVE, 2.5]], "{save}, {load}");
            Ok(())
        })
        .unwrap();
    }
}

/// `w * total`, of which `total` sums up the inputs of all forwards in training. Keeps what its random numbers are keyed by.
#[derive(FsdpUnit)]
struct Running {
    w: Param,
    #[fsdp(buffer)]
    total: Tensor,
    #[fsdp(skip)]
    keys: Mutex<Vec<u64>>,
}

impl Running {
    fn shard(world: &World, seed: u64) -> fsdp::Result<Fsdp<Running>> {
        let w = Param::new(5).with_init(Init::Constant(1.0));
        let model = Running { w, total: full(0.0), keys: Mutex::default() };
        let config = FsdpConfig { seed, ..FsdpConfig::default() };
        model.fully_shard_with(&world.data_parallel_mesh(), &config)
    }
}

impl Forward for Running {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        self.keys.lock().unwrap().push(scope.random_stream().key());
        self.total.slice_set(&(&self.total + x)?, 0, 0)?;
        (self.w.tensor(scope)? * self.total.copy()?)?.sum_all()
    }
}

fn full(value: f32) -> Tensor {
    Tensor::full(value, 5, &Device::Cpu).unwrap()
}

/// Losses, and what the random numbers are keyed by, of steps with the inputs 1, 2, 3, ..
type Seen = (Vec<f32>, Vec<u64>);

/// Trains the steps `at`, after it has restored what `dir` has if they are not the first; saves.
fn train(ranks: usize, seed: u64, at: std::ops::Range<u64>, dir: &Path) -> Seen {
    let seen = launch::local(ranks, |world| -> fsdp::Result<Seen> {
        let mut model = Running::shard(&world, seed)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.25))?;
        if at.start > 0 {
            let restore = Restore::new(&mut model).optimizer(&mut optimizer);
            Checkpoints::new(dir).restore_latest(restore)?.unwrap();
            assert_eq!(model.step_count(), at.start);
        }
        let mut losses = Vec::new();
        for step in at.clone() {
            let loss: Tensor = model.forward(&full((step + 1) as f32))?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            losses.push(loss.to_scalar()?);
        }
        Checkpoints::new(dir).save(Contents::of(&model).optimizer(&optimizer))?;
        let keys = std::mem::take(&mut *model.module().keys.lock().unwrap());
        Ok((losses, keys))
    });
    seen.unwrap().remove(0)
}

#[test]
fn a_sum_in_a_buffer_goes_on_where_it_was() {
    for (save, load) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        // Sums of the inputs 1, 3, 6, 10; weights 1, 0.75, 0, -1.5; five elements each.
        assert_eq!(train(save, 0, 0..2, dir.path()).0, [5.0, 5.0 * 0.75 * 3.0]);
        assert_eq!(train(load, 0, 2..4, dir.path()).0, [0.0, 5.0 * -1.5 * 10.0], "{save}, {load}");
    }
}

#[test]
fn random_numbers_go_on_where_they_were() {
    let whole = tempfile::tempdir().unwrap();
    let (_, whole) = train(1, 7, 0..4, whole.path());
    for (save, load) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let (_, mut keys) = train(save, 7, 0..2, dir.path());
        // Another seed, which the checkpoint's replaces.
        keys.extend(train(load, 99, 2..4, dir.path()).1);
        assert_eq!(keys, whole, "{save}, {load}");
    }
    assert!((1..4).all(|at| !whole[..at].contains(&whole[at])), "{whole:x?}");
}

#[test]
fn the_warm_up_of_an_average_goes_on_where_it_was() {
    for (save, load) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        launch::local(save, |world| -> fsdp::Result<()> {
            let model = Running::shard(&world, 0)?;
            let mut average = model.ema(0.999)?.warmup();
            (0..2).try_for_each(|_| average.update(&model))?;
            Checkpoints::new(dir.path()).save(Contents::of(&model).average("ema", &average)).map(drop)
        })
        .unwrap();
        launch::local(load, |world| -> fsdp::Result<()> {
            let mut model = Running::shard(&world, 0)?;
            let mut average = model.ema(0.999)?.warmup();
            let restore = Restore::new(&mut model).average("ema", &mut average);
            Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
            assert_eq!(average.next_decay(), 4.0 / 13.0, "of the third update: {save}, {load}");
            // From 1 towards 14, of which the update takes 9/13.
            model.load_weights(|_, _, values| {
                values.fill(14.0);
                Ok(())
            })?;
            average.update(&model)?;
            model.with_ema(&mut average, |model| {
                model.visit_weights(|_, values| {
                    assert_each_close(values, 10.0, relative(1e-6), "the average");
                    Ok(())
                })
            })
        })
        .unwrap();
    }
}
