//! Every tensor is the same, bit for bit, after a round trip through any two numbers of ranks, strategies and layouts.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Tensor;
use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, Restore};
use fsdp::launch::{LaunchError, World};
use fsdp::prelude::*;

use crate::model::{Net, input, step};

const RANKS: [usize; 6] = [1, 2, 3, 4, 7, 8];

/// How a run is sharded.
#[derive(Clone, Debug)]
struct Way {
    ranks: usize,
    outer: usize,
    config: FsdpConfig,
}

/// Scrambles a number (splitmix64).
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) >> 8
}

/// A way drawn for `ranks` ranks.
fn way(ranks: usize, draw: u64) -> Way {
    let pick = |word: u64, of: usize| mix(draw << 16 | (ranks as u64) << 8 | word) as usize % of;
    let divisors: Vec<usize> = (1..=ranks).filter(|outer| ranks.is_multiple_of(*outer)).collect();
    let outer = divisors[pick(0, divisors.len())];
    let strategy = Strategy::ALL[pick(1, 4)];
    let can_share = ranks / outer > 1 && strategy.shards_optim();
    let config = FsdpConfig {
        strategy,
        outer: if can_share && pick(2, 2) == 1 { OuterStrategy::Optim } else { OuterStrategy::NoShard },
        alignment: if pick(3, 2) == 0 { ShardAlignment::Element } else { ShardAlignment::Row },
        bucket_size: [None, Some(16)][pick(4, 2)],
        ..FsdpConfig::default()
    };
    Way { ranks, outer, config }
}

fn shard(world: &World, way: &Way) -> fsdp::Result<Fsdp<Net>> {
    let mesh = world.mesh(&[("dp_outer", way.outer), ("dp_shard", way.ranks / way.outer)])?;
    Net::new(2).fully_shard_with(&mesh, &way.config)
}

/// All tensors of a checkpoint, as bytes.
fn tensors(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert!(checkpoint.verify(|_| ()).unwrap().is_empty());
    let mut all = BTreeMap::new();
    for (section, tensors) in &checkpoint.index().tensors {
        for (name, tensor) in tensors {
            let bytes = checkpoint.read_bytes(section, name, 0..tensor.numel()).unwrap();
            all.insert(format!("{section}:{name}"), bytes);
        }
    }
    all
}

/// Trains some steps and saves; the path of the checkpoint.
fn train_and_save(way: &Way, dir: &Path) -> Result<std::path::PathBuf, LaunchError> {
    let paths = launch::local(way.ranks, |world| -> fsdp::Result<_> {
        let mut model = shard(&world, way)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(1e-2))?;
        let mut ema = model.ema(0.9)?;
        for at in 0..3 {
            step(&mut model, &mut optimizer, &input(world.rank(), at))?;
            ema.update(&model)?;
        }
        let contents = Contents::of(&model).optimizer(&optimizer).average("ema", &ema);
        Checkpoints::new(dir).save(contents.value("cursor", &42u64))
    })?;
    assert!(paths.iter().all(|path| *path == paths[0]));
    Ok(paths[0].clone())
}

/// Restores into a model of other weights and saves again.
fn restore_and_save(way: &Way, from: &Path, dir: &Path) -> Result<std::path::PathBuf, LaunchError> {
    let config = FsdpConfig { seed: 99, ..way.config.clone() };
    let way = Way { config, ..way.clone() };
    let paths = launch::local(way.ranks, |world| -> fsdp::Result<_> {
        let mut model = shard(&world, &way)?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let mut ema = model.ema(0.9)?;
        let restore = Restore::new(&mut model).optimizer(&mut optimizer).average("ema", &mut ema);
        let restored = restore.from(from)?;
        assert!(restored.skipped.is_empty() && restored.unused.is_empty());
        assert_eq!(restored.checkpoint.value::<u64>("cursor").unwrap(), 42);
        assert_eq!((model.step_count(), optimizer.steps(), ema.updates()), (3, 3, 3));
        assert_eq!(optimizer.learning_rate(), 1e-2);
        let contents = Contents::of(&model).optimizer(&optimizer).average("ema", &ema);
        Checkpoints::new(dir).save(contents.value("cursor", &42u64))
    })?;
    Ok(paths[0].clone())
}

#[test]
fn every_tensor_is_the_same_at_any_other_number_of_ranks() {
    for save in RANKS {
        let dir = tempfile::tempdir().unwrap();
        let path = train_and_save(&way(save, 1), &dir.path().join("a")).unwrap();
        let saved = tensors(&path);
        assert_eq!(saved.len(), 11 + 3 * 7, "{:?}", saved.keys().collect::<Vec<_>>());
        for load in RANKS {
            for draw in 0..2 {
                let way = way(load, 10 + draw);
                let copy = restore_and_save(&way, &path, &dir.path().join(format!("{load}-{draw}"))).unwrap();
                let loaded = tensors(&copy);
                for (name, bytes) in &saved {
                    assert!(loaded[name] == *bytes, "{name} saved by {save} ranks, loaded as {way:?}");
                }
                assert_eq!(loaded.len(), saved.len());
            }
        }
    }
}

#[test]
fn sixteen_bit_weights_come_back_with_their_main_weights() {
    for precision in [
        MixedPrecision::BF16,
        MixedPrecision::F16,
        MixedPrecision { main_weights: false, ..MixedPrecision::BF16 },
    ] {
        for (save, load) in [(2, 3), (3, 1), (1, 4)] {
            let dir = tempfile::tempdir().unwrap();
            let config = FsdpConfig { precision, ..FsdpConfig::default() };
            let run = |ranks: usize, from: Option<&Path>, dir: &Path| {
                launch::local(ranks, |world| -> fsdp::Result<_> {
                    let mut model = Net::new(2).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let mut optimizer = model.optimizer(AdamW::default())?;
                    match from {
                        Some(from) => {
                            Restore::new(&mut model).optimizer(&mut optimizer).from(from)?;
                        }
                        None => {
                            for at in 0..2 {
                                step(&mut model, &mut optimizer, &input(world.rank(), at))?;
                            }
                        }
                    }
                    let path = Checkpoints::new(dir).save(Contents::of(&model).optimizer(&optimizer))?;
                    let loss: Tensor = model.evaluate(&input(0, 9))?;
                    Ok((path, loss.to_scalar::<f32>()?.to_bits()))
                })
                .unwrap()
                .remove(0)
            };
            let (first, loss) = run(save, None, &dir.path().join("a"));
            let (second, again) = run(load, Some(&first), &dir.path().join("b"));
            assert!(tensors(&first) == tensors(&second));
            assert_eq!(loss, again, "the model weights are rounded alike");
            let stored = Checkpoint::open(&first).unwrap();
            let dtype = |name: &str| stored.tensor("model", name).unwrap().dtype.name();
            let expected = if precision.main_weights { "F32" } else { "BF16" };
            assert_eq!((dtype("layers.0.weight"), dtype("exact")), (expected, "F32"));
        }
    }
}

#[test]
fn training_goes_on_bit_for_bit_at_the_same_number_of_ranks() {
    for (way, draw) in
        [1, 2, 3, 4].into_iter().flat_map(|ranks| (0..3).map(move |draw| (way(ranks, 20 + draw), draw)))
    {
        let dir = tempfile::tempdir().unwrap();
        let losses = |restart: bool| {
            launch::local(way.ranks, |world| -> fsdp::Result<Vec<u32>> {
                let mut model = shard(&world, &way)?;
                let mut optimizer = model.optimizer(AdamW::default().lr(1e-2))?;
                let mut losses = Vec::new();
                for at in 0..8 {
                    if restart && at == 5 {
                        let store = Checkpoints::new(dir.path());
                        store.save(Contents::of(&model).optimizer(&optimizer))?;
                        (model, optimizer) = {
                            let mut model = shard(&world, &way)?;
                            let mut optimizer = model.optimizer(AdamW::default())?;
                            let restore = Restore::new(&mut model).optimizer(&mut optimizer);
                            store.restore_latest(restore)?.expect("it was saved");
                            (model, optimizer)
                        };
                    }
                    let loss = step(&mut model, &mut optimizer, &input(world.rank(), at))?;
                    losses.push(loss.to_bits());
                }
                Ok(losses)
            })
            .unwrap()
        };
        assert_eq!(losses(false), losses(true), "{way:?}, draw {draw}");
    }
}

#[test]
fn numbers_come_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let numbers = (0..2000).map(|draw| f64::from_bits(mix(draw) << 8 | mix(draw + 5000) & 0xff));
    let numbers: Vec<f64> = numbers.filter(|number| number.is_finite()).collect();
    let rate = numbers.iter().copied().find(|number| (1e-9..1e3).contains(number)).unwrap_or(0.1 + 0.2);
    let path = launch::local(2, |world| -> fsdp::Result<_> {
        let mut model = Net::new(2).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        step(&mut model, &mut optimizer, &input(world.rank(), 0))?;
        optimizer.set_learning_rate(rate);
        let contents = Contents::of(&model).optimizer(&optimizer).value("numbers", &numbers);
        Checkpoints::new(dir.path()).save(contents)
    });
    let path = path.unwrap().remove(0);
    let restored = launch::local(1, |world| -> fsdp::Result<_> {
        let mut model = Net::new(2).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let restored = Restore::new(&mut model).optimizer(&mut optimizer).from(&path)?;
        Ok((optimizer.learning_rate(), restored.checkpoint.value::<Vec<f64>>("numbers")?))
    });
    let (rate_again, numbers_again) = restored.unwrap().remove(0);
    let bits = |numbers: &[f64]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    assert_eq!((rate_again, bits(&numbers_again)), (rate, bits(&numbers)));
}
