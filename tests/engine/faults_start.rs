//! How a model starts: on a mesh that fits, with the same values on every rank of it.

use std::net::TcpListener;

use candle_core::{DType, Device, Result, Tensor};
use fsdp::comm::local::LocalOptions;
use fsdp::comm::tcp::{Place, TcpComm};
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use crate::fixtures::{
    Dot, Dots, config, dot, full, gradients, launcher, named, on_joined_ranks, on_ranks, weights,
};

#[test]
fn sizes_that_do_not_make_the_world_are_refused_on_all_ranks() {
    type Dims<'a> = &'a [(&'a str, usize)];
    let cases: [(usize, Dims, &[&str]); 4] = [
        (4, &[("dp_outer", 3), ("dp_shard", 2)], &["dp_outer=3", "dp_shard=2", "6 ranks", "has 4"]),
        (6, &[("dp_shard", 4)], &["dp_shard=4", "4 ranks", "has 6"]),
        (2, &[("dp_shard", 8)], &["dp_shard=8", "8 ranks", "has 2"]),
        (1, &[("dp_outer", 2), ("dp_shard", 1)], &["dp_outer=2", "dp_shard=1", "2 ranks", "has 1"]),
    ];
    for (ranks, dims, parts) in cases {
        on_ranks(ranks, |world| {
            let error = world.mesh(dims).unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "{part} in {error}");
            }
            Ok(())
        });
    }
}

/// Ranks in processes of several machines have the host's communicator only.
#[test]
fn a_mesh_without_collectives_of_streams_is_refused_when_a_model_is_sharded() {
    let free = TcpListener::bind(("127.0.0.1", 0)).expect("there is a free port");
    let port = free.local_addr().expect("it has an address").port();
    drop(free);
    let place = Place { rank: 0, size: 1, local_rank: 0, address: ("127.0.0.1".to_owned(), port) };
    let control = TcpComm::join(&place, LocalOptions::default()).expect("it joins itself");
    let mesh = DeviceMesh::new(&[("dp_shard", 1)], control).expect("one rank is a mesh of one");
    let said = Param::new(8).fully_shard(&mesh).map(drop).unwrap_err().to_string();
    let words = [
        "configuration: a model cannot be sharded over this mesh: ",
        "have no collectives of streams",
        "threads of one process (`launch::local`)",
        "`mesh.on(&device)`",
    ];
    assert!(words.iter().all(|word| said.contains(*word)), "{said}");
}

/// The ranks are threads here, each joined to the others as a process is.
#[test]
fn ranks_in_processes_train_to_the_bits_of_ranks_in_threads() {
    for strategy in Strategy::ALL {
        let train = |world: fsdp::launch::World| {
            let (outer, inner) = if world.size() == 4 { (2, 2) } else { (1, world.size()) };
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
            let mut model = dot(7).fully_shard_with(&mesh, &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            for step in 0..3 {
                let x: Vec<f32> =
                    (0..7).map(|i| ((i * 5 + world.rank() * 3 + step) % 11) as f32 / 7.0).collect();
                let x = Tensor::new(x, &Device::Cpu)?;
                let loss = model.forward(&vec![x])?;
                model.backward(&loss)?;
                model.clip_grad_norm(1.0)?;
                optimizer.step(&mut model)?;
            }
            let bits = weights(&model)?
                .into_iter()
                .map(|(name, values)| (name, values.into_iter().map(f32::to_bits)));
            Ok(bits.map(|(name, bits)| (name, bits.collect())).collect::<Vec<(String, Vec<u32>)>>())
        };
        for ranks in [2, 3, 4] {
            assert_eq!(on_joined_ranks(ranks, train), on_ranks(ranks, train), "{strategy}, {ranks} ranks");
        }
    }
}

#[test]
fn a_dim_of_size_one_changes_nothing_that_is_not_said() {
    on_ranks(2, |world| {
        for dims in [[("dp_outer", 1), ("dp_shard", 2)], [("dp_outer", 2), ("dp_shard", 1)]] {
            for strategy in Strategy::ALL {
                let model = dot(3).fully_shard_with(&world.mesh(&dims)?, &config(strategy))?;
                assert_eq!(model.strategy(), strategy);
            }
        }
        Ok(())
    });
}

#[test]
fn every_replica_starts_as_one_process_does() {
    let initial = |outer: usize, inner: usize, init: Init| {
        let all = on_ranks(outer * inner, |world| {
            let unit = |n| Unit::new(Dot { w: Param::new(n).with_init(init) });
            let model = Dots { units: vec![unit(5), unit(70)] };
            let config = FsdpConfig { seed: 100, ..config(Strategy::default()) };
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
            weights(&model.fully_shard_with(&mesh, &config)?)
        });
        assert!(all.iter().all(|weights| *weights == all[0]), "replicas differ");
        all[0].clone()
    };
    for init in [Init::Normal { mean: 0.0, std: 0.02 }, Init::Uniform { low: -0.5, high: 1.5 }] {
        assert_eq!(initial(2, 2, init), initial(1, 1, init));
        assert_eq!(initial(4, 1, init), initial(1, 1, init));
    }
}

#[test]
fn uniform_values_are_the_words_of_the_stream_that_seed_and_name_choose() {
    // The upper 24 bits of the first words of ChaCha with 8 rounds, by another program.
    let words: [(u64, &str, [u32; 7]); 4] = [
        (3, "units.0.w", [0xde4abc, 0x4a1b38, 0xdcc885, 0x73fd16, 0x3445ab, 0xaeab98, 0x85c7ea]),
        (3, "units.1.w", [0x772ff0, 0x07c48a, 0x46d45f, 0xa6733b, 0x16a61a, 0x2f1c2a, 0x390961]),
        (4, "units.0.w", [0x51b9af, 0x097402, 0x9b82af, 0x210e1a, 0x689f27, 0x9850a8, 0x1cf256]),
        (4, "units.1.w", [0xf0d359, 0x64f3af, 0xfce7f1, 0xf4ef87, 0x65e268, 0xe004b8, 0xd4fd7b]),
    ];
    for (ranks, seed) in [(1, 3), (2, 3), (3, 3), (1, 4), (3, 4)] {
        on_ranks(ranks, |world| {
            let unit = || Param::new(7).with_init(Init::Uniform { low: 0.0, high: 1.0 });
            let units = vec![Unit::new(Dot { w: unit() }), Unit::new(Dot { w: unit() })];
            // Shards of 3 and 4 elements, not of 64 bytes: the second one begins inside.
            let config = FsdpConfig { seed, alignment: ShardAlignment::Row, ..config(Strategy::default()) };
            let model = Dots { units }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            for (name, values) in weights(&model)? {
                let (_, _, expected) =
                    words.iter().find(|(of, param, _)| (*of, *param) == (seed, &*name)).unwrap();
                let found: Vec<u32> = values.iter().map(|value| (value * 16_777_216.0) as u32).collect();
                assert_eq!(found, expected, "{name} of seed {seed} on {ranks} ranks");
            }
            Ok(())
        });
    }
}

#[test]
fn each_parameter_starts_with_the_values_of_its_own_name() {
    let normal = Init::Normal { mean: 0.5, std: 2.0 };
    for ranks in [1, 3] {
        on_ranks(ranks, |world| {
            let dot = || Unit::new(Dot { w: Param::new(70).with_init(normal) });
            let model = Dots { units: vec![dot(), dot()] };
            let config = FsdpConfig { seed: 11, ..config(Strategy::default()) };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let all = weights(&model)?;
            for (name, values) in &all {
                let mut expected = [0.0; 70];
                normal.fill(11, name, 0..70, &mut expected);
                assert_eq!(*values, expected, "{name}");
            }
            // Parameters of one shape, and shards of one parameter, share no value.
            let mut bits: Vec<u32> =
                all.iter().flat_map(|(_, values)| values).map(|value| value.to_bits()).collect();
            bits.sort_unstable();
            bits.dedup();
            assert_eq!(bits.len(), 2 * 70);
            Ok(())
        });
    }
}

#[test]
fn another_seed_starts_with_other_values() {
    let first = |seed| {
        let model = Dots { units: vec![Unit::new(Dot { w: Param::new(40) })] };
        let config = FsdpConfig { seed, ..FsdpConfig::default() };
        weights(&model.fully_shard_with(&DeviceMesh::single(), &config).unwrap()).unwrap()
    };
    assert_eq!(first(1), first(1));
    assert_ne!(first(1), first(2));
}

#[test]
fn another_seed_on_every_rank_is_refused_with_the_seeds() {
    let error = launcher(4)
        .run(|world| -> fsdp::Result<()> {
            let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)])?;
            let config = FsdpConfig { seed: 100 + world.rank() as u64, ..FsdpConfig::default() };
            dot(3).fully_shard_with(&mesh, &config).map(drop)
        })
        .unwrap_err()
        .to_string();
    for seed in 100..104 {
        assert!(error.contains(&format!("seed {seed}")), "{seed} in {error}");
    }
    assert_eq!(error.matches("the ranks differ").count(), 4, "{error}");
}

#[derive(FsdpUnit)]
struct Tables {
    w: Param,
    #[fsdp(buffer)]
    table: Tensor,
    #[fsdp(buffer)]
    mask: Vec<Tensor>,
}

#[test]
fn buffers_start_as_rank_0_has_them() {
    for dims in [[("dp_outer", 2), ("dp_shard", 2)], [("dp_outer", 1), ("dp_shard", 4)]] {
        on_ranks(4, |world| {
            let first = world.rank() == 0;
            let table = Tensor::new(&if first { [7f32, 8.0] } else { [-1.0, -1.0] }, &Device::Cpu)?;
            let mask = Tensor::new(&if first { [[1u8, 2], [3, 4]] } else { [[0; 2]; 2] }, &Device::Cpu)?;
            // A view: its elements are not in row-major order.
            let mask = vec![mask.clone().t()?, table.to_dtype(DType::BF16)?];
            let model = Tables { w: Param::new(3), table, mask }.fully_shard(&world.mesh(&dims)?)?;
            assert_eq!(model.module().table.to_vec1::<f32>()?, [7.0, 8.0]);
            assert_eq!(model.module().mask[0].to_vec2::<u8>()?, [[1, 3], [2, 4]]);
            assert_eq!(model.module().mask[1].to_dtype(DType::F32)?.to_vec1::<f32>()?, [7.0, 8.0]);
            Ok(())
        });
    }
}

#[test]
fn buffers_of_another_shape_are_refused_by_name() {
    on_ranks(2, |world| {
        let table = full(2 + world.rank(), 1.0);
        let model = Tables { w: Param::new(3), table, mask: Vec::new() };
        let error = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        for part in ["`table`", "[2] f32", "[3] f32", "rank 0", "rank 1"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        Ok(())
    });
}

impl Forward for Tables {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        (self.table.broadcast_mul(&self.w.tensor(scope)?)? * x)?.sum_all()
    }
}

#[test]
fn forwards_and_gradients_of_every_rank_are_by_the_buffers_of_rank_0() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let w = Param::new(2).with_init(Init::Constant(0.5));
            let table = full(2, [3.0, 100.0, -100.0][world.rank()]);
            let model = Tables { w, table, mask: Vec::new() };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let loss: Tensor = model.forward(&full(2, 2.0))?;
            // Two elements of 3 x 0.5 x 2.
            assert_eq!(loss.to_scalar::<f32>()?, 6.0, "{strategy}");
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("w", &[6.0; 2])]), "{strategy}");
            Ok(())
        });
    }
}

#[derive(FsdpUnit)]
struct Declared {
    #[fsdp(init = constant(3.0))]
    declared: Param,
    free: Param,
}

impl Forward for Declared {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        ((self.declared.tensor(scope)? * x)? - (self.free.tensor(scope)? * x)?)?.sum_all()
    }
}

#[test]
fn the_initial_value_that_a_field_declares_counts_before_that_of_its_parameter() {
    for (ranks, strategy) in Strategy::ALL.into_iter().flat_map(|strategy| [(1, strategy), (2, strategy)]) {
        on_ranks(ranks, |world| {
            let ones = || Param::new(20).with_init(Init::Ones);
            let model = Declared { declared: ones(), free: ones() };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let difference: Tensor = model.evaluate(&full(20, 0.5))?;
            assert_eq!(difference.to_scalar::<f32>()?, 20.0 * (3.0 - 1.0) * 0.5, "{strategy}, {ranks} ranks");
            Ok(())
        });
    }
}

/// Tied by attribute; in evaluation, the largest difference of the two views.
#[derive(FsdpUnit)]
struct Tied {
    embed: Param,
    #[fsdp(tie_with = "embed")]
    head: Param,
}

impl Forward for Tied {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let (embed, head) = (self.embed.tensor(scope)?, self.head.tensor(scope)?);
        if scope.is_training() {
            // x embed headᵀ, so that both uses matter.
            x.matmul(&embed)?.matmul(&head.t()?)?.tanh()?.sum_all()
        } else {
            (embed - head)?.abs()?.max_all()
        }
    }
}

#[test]
fn a_tie_lasts_from_the_start_through_training() {
    let train = |ranks, strategy| {
        let all = on_ranks(ranks, |world| {
            let tied = Tied { embed: Param::new((4, 2)), head: Param::new((4, 2)) };
            let config = FsdpConfig { seed: 7, ..config(strategy) };
            let mut model = tied.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            let x =
                Tensor::from_iter((0..12).map(|i| i as f32 / 6.0 - 0.7), &Device::Cpu)?.reshape((3, 4))?;
            for _ in 0..3 {
                let apart: Tensor = model.evaluate(&x)?;
                assert_eq!(apart.to_scalar::<f32>()?, 0.0);
                let loss: Tensor = model.forward(&x)?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            let apart: Tensor = model.evaluate(&x)?;
            assert_eq!(apart.to_scalar::<f32>()?, 0.0);
            weights(&model)
        });
        assert!(all.iter().all(|weights| *weights == all[0]));
        all[0].clone()
    };
    let single = train(1, Strategy::NoShard);
    assert_eq!(single.len(), 1);
    for strategy in Strategy::ALL {
        assert_close(&train(2, strategy), &single, relative(1e-6), strategy);
    }
}
