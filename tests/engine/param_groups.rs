//! Parameter groups: settings that differ from parameter to parameter, in one pass over the shards.

use candle_core::{Result, Tensor};
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;
use fsdp::spec::ParamSpec;

use crate::fixtures::{Dot, Dots, config, dot, full, on_ranks, weights};

/// A matrix and two vectors in one bucket; dloss/dp = x for each element of `a`, `b` and `c`.
#[derive(FsdpUnit)]
struct Layer {
    a: Param,
    b: Param,
    #[fsdp(no_decay)]
    c: Param,
}

#[derive(FsdpUnit)]
struct Model {
    layer: Unit<Layer>,
}

impl Model {
    fn new() -> Model {
        let param = |dims: &[usize]| Param::new(dims).with_init(Init::Constant(1.0));
        Model { layer: Unit::new(Layer { a: param(&[5, 7]), b: param(&[37]), c: param(&[3]) }) }
    }
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let sum = |param: &Param| param.tensor(scope)?.sum_all();
        ((sum(&self.a)? + sum(&self.b)?)? + sum(&self.c)?)? * x
    }
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.layer.forward(x, &(), scope)
    }
}

fn scalar(x: f32) -> Tensor {
    Tensor::new(x, &candle_core::Device::Cpu).unwrap()
}

/// Weights of [`Model`] after three steps of `optimizer`, by name.
fn train<O: Optimizer>(
    ranks: usize,
    strategy: Strategy,
    rule: impl Fn() -> O + Sync,
    assign: impl Fn(&ParamSpec) -> ParamGroup + Sync,
) -> Vec<(String, Vec<f32>)> {
    let mut all = on_ranks(ranks, |world| {
        let mut model = Model::new().fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        let mut optimizer = model.optimizer_with(rule(), &assign)?;
        for step in 1..=3 {
            let loss: Tensor = model.forward(&scalar(0.25 * step as f32))?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        weights(&model)
    });
    all.swap_remove(0)
}

#[test]
fn each_parameter_follows_its_own_group() {
    let rule = || AdamW::default().lr(0.1).weight_decay(0.5).betas(0.9, 0.99);
    let plain = |_: &ParamSpec| ParamGroup::default();
    let expected = [
        train(1, Strategy::NoShard, rule, plain).swap_remove(0),
        train(1, Strategy::NoShard, || rule().lr(0.025).weight_decay(0.125).betas(0.5, 0.75), plain)
            .swap_remove(1),
        // Marked `no_decay`: its group's decay does not matter.
        train(1, Strategy::NoShard, || rule().lr(0.05), plain).swap_remove(2),
    ];
    for strategy in Strategy::ALL {
        for ranks in [1, 2, 4] {
            let got = train(ranks, strategy, rule, |spec| match spec.name.as_str() {
                "layer.b" => ParamGroup::new("b").lr_factor(0.25).weight_decay(0.125).betas(0.5, 0.75),
                "layer.c" => ParamGroup::new("c").lr_factor(0.5).weight_decay(9.0),
                _ => ParamGroup::default(),
            });
            assert_eq!(got, expected, "{strategy}, {ranks} ranks");
        }
    }
}

#[test]
fn groups_are_listed_with_their_members() {
    on_ranks(2, |world| {
        let model = Model::new().fully_shard(&world.data_parallel_mesh())?;
        let optimizer = model.optimizer_with(AdamW::default(), |spec| match spec.no_decay {
            true => ParamGroup::new("bare"),
            false => ParamGroup::new("rest").weight_decay(0.1),
        })?;
        let groups = optimizer.param_groups();
        assert_eq!(groups.to_string(), "rest (weight decay 0.1):\n  layer.a\n  layer.b\nbare:\n  layer.c\n");
        assert_eq!(groups.group_of("layer.c").map(|group| group.name()), Some("bare"));
        assert!(groups.group_of("layer.d").is_none());
        let names: Vec<&str> = groups.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["layer.a", "layer.b", "layer.c"]);
        Ok(())
    });
}

#[test]
fn one_name_means_one_set_of_settings() {
    on_ranks(1, |world| {
        let model = Model::new().fully_shard(&world.data_parallel_mesh())?;
        let assign = |spec: &ParamSpec| ParamGroup::new("all").lr_factor(spec.shape[0] as f64);
        let error = model.optimizer_with(AdamW::default(), assign).unwrap_err().to_string();
        for part in ["`layer.a`", "learning rate x 5", "`layer.b`", "learning rate x 37"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        Ok(())
    });
}

#[test]
fn ranks_that_group_differently_are_told_apart() {
    on_ranks(2, |world| {
        let model = Dots { units: vec![Dot::zeros(3), Dot::zeros(3)] };
        let mut model = model.fully_shard(&world.data_parallel_mesh())?;
        let rank = world.rank();
        let mut optimizer = model.optimizer_with(Sgd::default(), |spec| match spec.name.as_str() {
            "units.1.w" => ParamGroup::new("tail").lr_factor(1.0 + rank as f64),
            _ => ParamGroup::default(),
        })?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
        model.backward(&loss)?;
        let error = optimizer.step(&mut model).unwrap_err().to_string();
        assert!(error.contains("`units.1.w` in optimizer group tail (learning rate x 2)"), "{error}");
        Ok(())
    });
}

/// A rule without a word on parameter groups.
#[derive(Debug)]
struct Plain;

impl Optimizer for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn update(&self, _: StepInfo, _: &mut Segment<'_>) {}

    fn learning_rate(&self) -> f64 {
        0.0
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> std::result::Result<(), OptimError> {
        Ok(())
    }
}

#[test]
fn a_setting_that_the_rule_would_lose_is_refused() {
    on_ranks(2, |world| {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        assert!(model.optimizer_with(Plain, |_| ParamGroup::new("named only")).is_ok());
        let error = model.optimizer_with(Plain, |_| ParamGroup::new("x").lr_factor(2.0)).unwrap_err();
        let expected = "plain: a parameter group cannot change the learning-rate factor of this rule";
        assert_eq!(error.to_string(), expected);
        let error =
            model.optimizer_with(Sgd::default(), |_| ParamGroup::new("x").betas(0.9, 0.9)).unwrap_err();
        assert_eq!(error.to_string(), "sgd: a parameter group cannot change the betas of this rule");
        let error = model.optimizer_with(AdamW::default(), |_| ParamGroup::new("x").weight_decay(-1.0));
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "adamw: weight decay must be finite and at least 0, got -1");
        Ok(())
    });
}

#[test]
fn sgd_decays_nothing_that_is_marked_no_decay() {
    for momentum in [0.0, 0.5] {
        on_ranks(2, |world| {
            let mut model = Model::new().fully_shard(&world.data_parallel_mesh())?;
            let mut optimizer =
                model.optimizer(Sgd::default().lr(0.1).momentum(momentum).weight_decay(0.5))?;
            // Gradients are 0, weights 1: what decays loses 0.1 x 0.5.
            let loss: Tensor = model.forward(&full(1, 0.0).sum_all()?)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            for (name, values) in weights(&model)? {
                let expected = if name == "layer.c" { 1.0 } else { 0.95 };
                assert!(values.iter().all(|value| *value == expected), "{name} {momentum}: {values:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_group_without_decay_of_its_own_leaves_no_decay_alone_in_every_strategy() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let mesh = world.data_parallel_mesh();
            let mut model = Model::new().fully_shard_with(&mesh, &config(strategy))?;
            let group = |_: &ParamSpec| ParamGroup::new("all").weight_decay(0.25);
            let mut optimizer = model.optimizer_with(Sgd::default().lr(1.0).weight_decay(0.5), group)?;
            let loss: Tensor = model.forward(&full(1, 0.0).sum_all()?)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            for (name, values) in weights(&model)? {
                let expected = if name == "layer.c" { 1.0 } else { 0.75 };
                assert!(values.iter().all(|value| *value == expected), "{name} {strategy}: {values:?}");
            }
            Ok(())
        });
    }
}
