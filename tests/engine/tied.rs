//! Tied parameters: one slot, the sum of both gradients, one update.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, on_ranks, weights};

/// `loss = sum(embed) + 2 * sum(head)`, the two tied by attribute.
#[derive(FsdpUnit)]
struct ByAttribute {
    embed: Param,
    #[fsdp(tie_with = "embed")]
    head: Param,
}

impl Forward for ByAttribute {
    fn forward(&self, _: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.embed.tensor(scope)?.sum_all()? + (self.head.tensor(scope)?.sum_all()? * 2.0)?
    }
}

#[derive(FsdpUnit)]
struct InOneUnit {
    unit: Unit<ByAttribute>,
}

impl Forward for InOneUnit {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)
    }
}

/// One parameter, held twice: by the root and by a unit.
#[derive(FsdpUnit)]
struct AcrossUnits {
    embed: Param,
    head: Unit<Head>,
}

#[derive(FsdpUnit)]
struct Head {
    weight: Param,
}

impl Forward for Head {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x + (self.weight.tensor(scope)?.sum_all()? * 2.0)?
    }
}

impl Forward for AcrossUnits {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let sum = (self.embed.tensor(scope)?.sum_all()? + x.sum_all()?)?;
        self.head.forward(&sum, &(), scope)
    }
}

/// One parameter, held by two units that stand side by side.
#[derive(FsdpUnit)]
struct BetweenUnits {
    first: Unit<Embedding>,
    second: Unit<Head>,
}

#[derive(FsdpUnit)]
struct Embedding {
    weight: Param,
}

impl Forward for Embedding {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x + self.weight.tensor(scope)?.sum_all()?
    }
}

impl BetweenUnits {
    fn new(weight: Param) -> BetweenUnits {
        let second = Unit::new(Head { weight: weight.clone() });
        BetweenUnits { first: Unit::new(Embedding { weight }), second }
    }
}

impl Forward for BetweenUnits {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.first.forward(x, &(), scope)?;
        self.second.forward(&x, &(), scope)
    }
}

/// One parameter, held by a unit and by one inside it.
#[derive(FsdpUnit)]
struct IntoAUnit {
    outer: Unit<Outer>,
}

#[derive(FsdpUnit)]
struct Outer {
    weight: Param,
    inner: Unit<Head>,
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = (x + self.weight.tensor(scope)?.sum_all()?)?;
        self.inner.forward(&x, &(), scope)
    }
}

impl Forward for IntoAUnit {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.outer.forward(x, &(), scope)
    }
}

/// The buckets by the names of what is in them.
fn buckets<M: FsdpUnit>(model: M) -> Vec<Vec<String>> {
    let model = model.fully_shard(&DeviceMesh::single()).unwrap();
    let layout = model.layout();
    let names = |bucket: &fsdp::layout::BucketLayout| {
        bucket.items.iter().map(|item| layout.params[item.param].name.clone()).collect()
    };
    layout.buckets.iter().map(names).collect()
}

#[test]
fn what_is_tied_across_units_has_a_bucket_of_its_own_in_the_root() {
    #[derive(FsdpUnit)]
    struct Wide {
        first: Param,
        tied: AcrossUnits,
        last: Param,
    }
    let embed = Param::new(8);
    let tied = AcrossUnits { embed: embed.clone(), head: Unit::new(Head { weight: embed }) };
    let wide = Wide { first: Param::new(3), tied, last: Param::new(5) };
    assert_eq!(buckets(wide), [vec!["first", "last"], vec!["tied.embed"]]);
}

#[test]
fn what_two_units_hold_is_the_roots() {
    #[derive(FsdpUnit)]
    struct Wide {
        first: Param,
        tied: BetweenUnits,
        last: Unit<Embedding>,
    }
    let last = Unit::new(Embedding { weight: Param::new(5) });
    let wide = Wide { first: Param::new(3), tied: BetweenUnits::new(Param::new(8)), last };
    let layout = wide.fully_shard(&DeviceMesh::single()).unwrap().layout().clone();
    let param = |name: &str| layout.params.iter().find(|spec| spec.name == name).unwrap();
    let tied = param("tied.first.weight");
    assert_eq!((tied.key.unit, &*tied.aliases), (0, &["tied.second.weight".to_string()][..]));
    assert_eq!((param("first").key.unit, param("last.weight").key.unit), (0, 3));
    let units: Vec<usize> = layout.buckets.iter().map(|bucket| bucket.key.unit).collect();
    assert_eq!(units, [0, 0, 3]);
}

#[test]
fn what_is_tied_in_the_root_has_a_bucket_of_its_own() {
    #[derive(FsdpUnit)]
    struct Wide {
        first: Param,
        tied: ByAttribute,
        last: Param,
    }
    let tied = ByAttribute { embed: Param::new(8), head: Param::new(8) };
    let wide = Wide { first: Param::new(3), tied, last: Param::new(5) };
    assert_eq!(buckets(wide), [vec!["first", "last"], vec!["tied.embed"]]);
}

fn train<M: Forward + FsdpUnit + Send>(make: impl Fn() -> M + Sync) {
    for ranks in [1, 2, 3] {
        for strategy in Strategy::ALL {
            for recompute in [Recompute::None, Recompute::Unit] {
                let all = on_ranks(ranks, |world| {
                    let config = FsdpConfig { recompute, ..config(strategy) };
                    let mut model = make().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let numel: usize = model.layout().params.iter().map(|spec| spec.numel()).sum();
                    assert_eq!(numel, 8);
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
                    let x = Tensor::zeros((), candle_core::DType::F32, &candle_core::Device::Cpu)?;
                    let mut norms = Vec::new();
                    for _ in 0..2 {
                        let loss: Tensor = model.forward(&x)?;
                        model.backward(&loss)?;
                        norms.push(model.grad_norm()?);
                        optimizer.step(&mut model)?;
                    }
                    Ok((norms, weights(&model)?))
                });
                for (norms, weights) in all {
                    assert_eq!(norms, [72f64.sqrt(); 2], "{strategy}, {ranks} ranks");
                    assert_eq!(weights.len(), 1);
                    assert_eq!(
                        weights[0],
                        ("embed".to_string().replace("embed", &weights[0].0), vec![-6.0; 8])
                    );
                }
            }
        }
    }
}

fn zeros() -> Param {
    Param::new((4, 2)).with_init(Init::Zeros)
}

#[test]
fn tied_by_attribute_inside_a_unit() {
    train(|| InOneUnit { unit: Unit::new(ByAttribute { embed: zeros(), head: zeros() }) });
}

#[test]
fn tied_by_attribute_in_the_root() {
    train(|| ByAttribute { embed: zeros(), head: zeros() });
}

#[test]
fn tied_by_cloning_across_units() {
    train(|| {
        let embed = zeros();
        AcrossUnits { head: Unit::new(Head { weight: embed.clone() }), embed }
    });
}

#[test]
fn tied_by_cloning_between_two_units() {
    train(|| BetweenUnits::new(zeros()));
}

#[test]
fn tied_by_cloning_into_a_unit_inside() {
    train(|| {
        let weight = zeros();
        let inner = Unit::new(Head { weight: weight.clone() });
        IntoAUnit { outer: Unit::new(Outer { weight, inner }) }
    });
}

#[derive(FsdpUnit)]
struct Misfit {
    embed: Param,
    #[fsdp(tie_with = "embed")]
    head: Param,
}

#[derive(FsdpUnit)]
struct Dangling {
    #[fsdp(tie_with = "embedding.weight")]
    head: Param,
}

#[derive(FsdpUnit)]
struct Disagree {
    embed: Param,
    #[fsdp(tie_with = "embed", frozen)]
    head: Param,
}

#[test]
fn a_tie_that_cannot_be_is_refused_with_both_names() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let misfit = Misfit { embed: Param::new((4, 2)), head: Param::new((2, 4)) };
        let error = misfit.fully_shard(&mesh).unwrap_err().to_string();
        for part in ["`head`", "`embed`", "[4, 2]", "[2, 4]"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let error = Dangling { head: Param::new(2) }.fully_shard(&mesh).unwrap_err().to_string();
        assert!(error.contains("`head`") && error.contains("`embedding.weight`"), "{error}");
        let disagree = Disagree { embed: Param::new(2), head: Param::new(2) };
        let error = disagree.fully_shard(&mesh).unwrap_err().to_string();
        assert!(error.contains("`head`") && error.contains("`embed`") && error.contains("frozen"), "{error}");
        Ok(())
    });
}
