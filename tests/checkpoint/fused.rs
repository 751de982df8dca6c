//! A fused weight is saved as the tensors it is made of, and each of them is cut among ranks by itself.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, MODEL, Restore};
use fsdp::prelude::*;

const ROWS: usize = 4;
const COLUMNS: usize = 3;

#[derive(FsdpUnit)]
struct Fused {
    #[fsdp(fused("gate.weight", "up.weight"))]
    gate_up: Param,
}

#[derive(FsdpUnit)]
struct Apart {
    #[fsdp(rename = "gate.weight")]
    gate: Param,
    #[fsdp(rename = "up.weight")]
    up: Param,
}

fn fused() -> Fused {
    Fused { gate_up: Param::new((2 * ROWS, COLUMNS)) }
}

fn apart() -> Apart {
    Apart { gate: Param::new((ROWS, COLUMNS)), up: Param::new((ROWS, COLUMNS)) }
}

/// Row `i` of the whole is `i, i, ..`: the gate has 0 to 3, what follows 4 to 7.
fn rows(first: usize, count: usize) -> Vec<f32> {
    (first..first + count).flat_map(|row| [row as f32; COLUMNS]).collect()
}

fn parts() -> BTreeMap<String, Tensor> {
    let part = |first| Tensor::from_vec(rows(first, ROWS), (ROWS, COLUMNS), &Device::Cpu).unwrap();
    [("gate.weight".to_owned(), part(0)), ("up.weight".to_owned(), part(ROWS))].into()
}

/// Saves weights and an average of them, which begins as they are.
fn save<M: FsdpUnit>(ranks: usize, dir: &Path, model: impl Fn() -> M + Sync) {
    launch::local(ranks, |world| -> fsdp::Result<()> {
        let mut model = model().fully_shard(&world.data_parallel_mesh())?;
        let parts = (world.rank() == 0).then(parts);
        model.load_full_state_dict(parts.as_ref(), true)?;
        let average = model.ema(0.5)?;
        Checkpoints::new(dir).save(Contents::of(&model).average("ema", &average)).map(drop)
    })
    .unwrap();
    let checkpoint = Checkpoint::open(Checkpoints::new(dir).latest().unwrap().unwrap()).unwrap();
    for section in [MODEL, "ema"] {
        let tensors = checkpoint.section(section).unwrap();
        let shapes: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..])).collect();
        assert_eq!(shapes, [("gate.weight", &[ROWS, COLUMNS][..]), ("up.weight", &[ROWS, COLUMNS])]);
    }
}

/// The weights, parameter after parameter, and those of the average.
fn load<M: FsdpUnit>(ranks: usize, dir: &Path, model: impl Fn() -> M + Sync) -> [Vec<f32>; 2] {
    let loaded = launch::local(ranks, |world| -> fsdp::Result<_> {
        let mut model = model().fully_shard(&world.data_parallel_mesh())?;
        let mut average = model.ema(0.5)?;
        let restore = Restore::new(&mut model).average("ema", &mut average);
        Checkpoints::new(dir).restore_latest(restore)?.expect("one was saved");
        let all = |model: &Fsdp<M>| {
            let mut all = Vec::new();
            model.visit_weights(|_, values| {
                all.extend_from_slice(values);
                Ok(())
            })?;
            fsdp::Result::Ok(all)
        };
        let weights = all(&model)?;
        let averaged = model.with_ema(&mut average, all)?;
        Ok([weights, averaged])
    });
    loaded.unwrap().swap_remove(0)
}

#[test]
fn rows_are_in_order_whoever_cuts_or_fuses_them() {
    for (saves, loads) in [(1, 4), (2, 1), (2, 4), (3, 2), (4, 3), (8, 5)] {
        let dir = tempfile::tempdir().unwrap();
        let (from_fused, from_apart) = (dir.path().join("fused"), dir.path().join("apart"));
        save(saves, &from_fused, fused);
        save(saves, &from_apart, apart);
        for dir in [&from_fused, &from_apart] {
            let expected = [rows(0, 2 * ROWS), rows(0, 2 * ROWS)];
            assert_eq!(load(loads, dir, fused), expected, "{saves} ranks, then {loads}");
            assert_eq!(load(loads, dir, apart), expected, "{saves} ranks, then {loads}");
        }
    }
}
