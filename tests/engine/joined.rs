//! One loss of two models: each gets its gradients once, as candle computes them for both in one process.

use candle_core::{Device, Result, Tensor, Var};
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use crate::fixtures::{config, gradients, on_ranks, weights};

const LEN: usize = 5;

/// `x * w`.
#[derive(FsdpUnit)]
struct Scale {
    w: Param,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x * self.w.tensor(scope)?
    }
}

/// `unit(x)^2 + x * shift`, with a parameter of a unit and one of the root.
#[derive(FsdpUnit)]
struct Half {
    shift: Param,
    unit: Unit<Scale>,
}

impl Forward for Half {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)?.sqr()? + (x * self.shift.tensor(scope)?)?
    }
}

impl Half {
    fn new(w: f32, shift: f32) -> Half {
        let param = |value| Param::new(LEN).with_init(Init::Constant(value));
        Half { shift: param(shift), unit: Unit::new(Scale { w: param(w) }) }
    }
}

/// The model in plain candle, to compare with: `shift`, then `w`.
struct Plain([Var; 2]);

impl Plain {
    fn new(w: f32, shift: f32) -> Plain {
        Plain([shift, w].map(|value| Var::from_tensor(&filled(value)).unwrap()))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [shift, w] = &self.0;
        (x * w.as_tensor())?.sqr()? + (x * shift.as_tensor())?
    }

    /// Steps down the gradients of a loss.
    fn step(&self, loss: &Tensor) -> Result<()> {
        let grads = loss.backward()?;
        for var in &self.0 {
            var.set(&(var.as_tensor() - (grads.get(var).unwrap() * LR)?)?)?;
        }
        Ok(())
    }

    fn gradients(&self, loss: &Tensor) -> Result<Vec<Vec<f32>>> {
        let grads = loss.backward()?;
        self.0.iter().map(|var| grads.get(var).unwrap().to_vec1()).collect()
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        self.0.iter().map(|var| var.to_vec1().unwrap()).collect()
    }
}

fn filled(value: f32) -> Tensor {
    Tensor::full(value, LEN, &Device::Cpu).unwrap()
}

/// Another input for each rank, step and use.
fn input(rank: usize, step: usize, salt: usize) -> Tensor {
    let value = |i: usize| ((7 * i + 5 * rank + 3 * step + 11 * salt) % 13) as f32 / 13.0;
    Tensor::from_iter((0..LEN).map(value), &Device::Cpu).unwrap()
}

const LR: f64 = 0.05;
const RANKS: usize = 2;

fn sgd() -> Sgd {
    Sgd::default().lr(LR).weight_decay(0.0)
}

fn assert_right(ours: &[(String, Vec<f32>)], right: &[Vec<f32>], what: &str) {
    let right: Vec<(String, Vec<f32>)> =
        ["shift", "unit.w"].map(str::to_owned).into_iter().zip(right.iter().cloned()).collect();
    assert_close(ours, &right[..], relative(1e-5), what);
}

fn mean(losses: impl Iterator<Item = Result<Tensor>>) -> Result<Tensor> {
    let losses: Vec<Tensor> = losses.collect::<Result<_>>()?;
    Tensor::stack(&losses, 0)?.mean_all()
}

/// An adversarial pair, `steps` steps of both, in one process.
fn adversarial_pair(steps: usize) -> Result<[Vec<Vec<f32>>; 2]> {
    let (generator, discriminator) = (Plain::new(0.5, 0.25), Plain::new(0.75, -0.5));
    for step in 0..steps {
        let loss = mean((0..RANKS).map(|rank| {
            let fake = generator.forward(&input(rank, step, 0))?.detach();
            discriminator.forward(&fake)?.sum_all()?
                - discriminator.forward(&input(rank, step, 1))?.sum_all()?
        }));
        discriminator.step(&loss?)?;
        let loss = mean((0..RANKS).map(|rank| {
            let fake = generator.forward(&input(rank, step, 2))?;
            discriminator.forward(&fake)?.sum_all()?.neg()
        }));
        generator.step(&loss?)?;
    }
    Ok([generator.weights(), discriminator.weights()])
}

#[test]
fn a_generator_learns_through_a_discriminator_as_in_one_process() {
    let right = adversarial_pair(3).unwrap();
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(RANKS, |world| {
                let config = FsdpConfig { recompute, ..config(strategy) };
                let mesh = world.data_parallel_mesh();
                let mut generator = Half::new(0.5, 0.25).fully_shard_with(&mesh, &config)?;
                let mut discriminator = Half::new(0.75, -0.5).fully_shard_with(&mesh, &config)?;
                let mut generator_step = generator.optimizer(sgd())?;
                let mut discriminator_step = discriminator.optimizer(sgd())?;
                for step in 0..3 {
                    let x = |salt| input(world.rank(), step, salt);
                    let fake: Tensor = generator.evaluate(&x(0))?;
                    let [on_fake, on_real]: [fsdp::Result<Tensor>; 2] =
                        [fake, x(1)].map(|x| discriminator.forward(&x));
                    discriminator.backward(&(on_fake?.sum_all()? - on_real?.sum_all()?)?)?;
                    discriminator_step.step(&mut discriminator)?;
                    let fake: Tensor = generator.forward(&x(2))?;
                    let score: Tensor = discriminator.forward(&fake)?;
                    generator.backward_with(&score.sum_all()?.neg()?, &[discriminator.joined()])?;
                    generator_step.step(&mut generator)?;
                    discriminator.zero_grad()?;
                }
                let what = format!("{strategy}, {recompute:?}");
                assert_right(&weights(&generator)?, &right[0], &format!("generator, {what}"));
                assert_right(&weights(&discriminator)?, &right[1], &format!("discriminator, {what}"));
                Ok(())
            });
        }
    }
}

#[test]
fn an_encoder_and_a_decoder_get_their_gradients_of_each_microbatch_once() {
    let (encoder, decoder) = (Plain::new(0.5, 0.25), Plain::new(0.75, -0.5));
    let loss = |microbatch| {
        mean((0..RANKS).map(move |rank| Ok((rank, microbatch))).map(|of: Result<(usize, usize)>| {
            let (rank, microbatch) = of?;
            decoder.forward(&encoder.forward(&input(rank, microbatch, 0))?)?.sum_all()
        }))
    };
    // Microbatches are summed.
    let loss = (loss(0).unwrap() + loss(1).unwrap()).unwrap();
    let right = [encoder.gradients(&loss).unwrap(), decoder.gradients(&loss).unwrap()];
    for strategy in Strategy::ALL {
        // Each of them may begin: the loss is of both.
        for encoder_begins in [true, false] {
            on_ranks(RANKS, |world| {
                let mesh = world.data_parallel_mesh();
                let encoder = Half::new(0.5, 0.25).fully_shard_with(&mesh, &config(strategy))?;
                let decoder = Half::new(0.75, -0.5).fully_shard_with(&mesh, &config(strategy))?;
                for microbatch in 0..2 {
                    let last = microbatch == 1;
                    encoder.set_is_last_microbatch(last);
                    decoder.set_is_last_microbatch(last);
                    let code: Tensor = encoder.forward(&input(world.rank(), microbatch, 0))?;
                    let loss = Fsdp::forward::<_, Tensor>(&decoder, &code)?.sum_all()?;
                    if encoder_begins {
                        encoder.backward_with(&loss, &[decoder.joined()])?;
                    } else {
                        decoder.backward_with(&loss, &[encoder.joined()])?;
                    }
                }
                assert_right(&gradients(&encoder)?, &right[0], &format!("encoder, {strategy}"));
                assert_right(&gradients(&decoder)?, &right[1], &format!("decoder, {strategy}"));
                Ok(())
            });
        }
    }
}

#[test]
fn what_several_models_cannot_have_is_refused_and_costs_none_of_them_anything() {
    on_ranks(RANKS, |world| {
        let mesh = world.data_parallel_mesh();
        let [mut ours, theirs, stranger] =
            [0.5, 0.75, 1.0].map(|w| Half::new(w, 0.0).fully_shard(&mesh).unwrap());
        let x = input(world.rank(), 0, 0);
        let loss = Fsdp::forward::<_, Tensor>(&ours, &x)?.sum_all()?;
        ours.backward(&loss)?;
        let before = gradients(&ours)?;
        let hidden: Tensor = ours.forward(&x)?;
        let refused = |error: fsdp::Result<()>, parts: &[&str]| {
            let error = error.unwrap_err().to_string();
            for part in parts {
                assert!(error.contains(part), "`{part}` is not in: {error}");
            }
        };
        let loss = hidden.sum_all()?;
        refused(ours.backward_with(&loss, &[ours.joined()]), &["`Half` is named twice"]);
        refused(ours.backward_with(&loss, &[theirs.joined()]), &["of model `Half` needs a training forward"]);
        let config = FsdpConfig { scaling: GradientScaling::PerToken, ..FsdpConfig::default() };
        let tokens = Half::new(1.0, 0.0).fully_shard_with(&mesh, &config)?;
        refused(ours.backward_with(&loss, &[tokens.joined()]), &["scaled per token"]);
        // A model that is left out says how it is let through.
        let deeper = Fsdp::forward::<_, Tensor>(&theirs, &hidden)?.sum_all()?;
        refused(
            theirs.backward(&deeper),
            &["unit `unit` of `Half`", "backward_with(&loss, &[other.joined()])"],
        );
        assert_eq!(gradients(&ours)?, before);
        // One that the loss does not come to ends the backward of all.
        let _: Tensor = stranger.forward(&x)?;
        refused(
            ours.backward_with(&loss, &[stranger.joined()]),
            &["no unit and no parameter of model `Half`"],
        );
        assert_eq!(gradients(&ours)?, []);
        ours.reset_step()?;
        let loss = Fsdp::forward::<_, Tensor>(&ours, &x)?.sum_all()?;
        ours.backward_with(&loss, &[])?;
        assert_eq!(gradients(&ours)?, before);
        Ok(())
    });
}
