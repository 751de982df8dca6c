//! Programs with several threads of one rank.

use std::sync::mpsc::channel;
use std::thread;

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::models::{Dot, Dots, full, gradients, weights};

/// The model cannot be shared, but what it returned can be sent: the backward of a loss, in another thread, while this one
/// writes weights.
#[test]
fn a_kept_loss_in_another_thread_while_weights_are_written() {
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        let mut model = Dots::new(2, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
        let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
        let (ask, asked) = channel();
        let (answer, answered) = channel();
        let other = thread::spawn(move || {
            for () in asked {
                answer.send(loss.backward().err().map(|error| error.to_string())).unwrap();
            }
        });
        model
            .load_weights(|_, _, values| {
                values.fill(3.0);
                ask.send(()).unwrap();
                let said = answered.recv().unwrap().expect("it is refused");
                assert!(said.contains("backward"), "{said}");
                assert_eq!(values, [3.0; 5]);
                Ok(())
            })
            .unwrap();
        drop(ask);
        other.join().unwrap();
        assert_eq!(weights(&model).unwrap(), [[3.0; 5]; 2]);
    }
}

/// Another thread takes a kept loss backward while the model's own backward runs in this thread.
#[test]
fn a_kept_loss_in_another_thread_while_the_backward_runs() {
    let model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    let kept: Tensor = model.forward(&full(5, 2.0)).unwrap();
    let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
    let other = thread::spawn(move || (0..50).filter(|_| kept.backward().is_ok()).count());
    model.backward(&loss).unwrap();
    assert_eq!(other.join().unwrap(), 0, "each is refused");
    assert_eq!(gradients(&model).unwrap(), [[1.0; 5]; 2]);
}

/// A sink is not the model's thread's alone: another thread that writes at any time changes the gradient or is refused.
#[test]
fn a_sink_written_by_another_thread() {
    for _ in 0..20 {
        let model = Dots::new(1, 64).fully_shard(&DeviceMesh::single()).unwrap();
        let sink = model.module().units[0].w.grad_sink();
        let loss: Tensor = model.forward(&full(64, 2.0)).unwrap();
        let other = thread::spawn(move || {
            let write = |values: &mut [f32], _| -> Result<(), ()> {
                values.fill(0.0);
                Ok(())
            };
            (0..200).filter(|_| sink.accumulate_f32(write) == Ok(true)).count()
        });
        model.backward(&loss).unwrap();
        other.join().unwrap();
        let gradients = gradients(&model).unwrap();
        assert!([[2.0; 64], [0.0; 64]].contains(&gradients[0][..].try_into().unwrap()), "{gradients:?}");
    }
}

#[test]
fn a_model_that_moves_to_another_thread() {
    let mut model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    let mut optimizer = model.optimizer(Sgd::default().lr(0.5)).unwrap();
    let x = full(5, 1.0);
    let mut step = move |mut model: Fsdp<Dots>| {
        let loss: Tensor = model.forward(&x).unwrap();
        model.backward(&loss).unwrap();
        optimizer.step(&mut model).unwrap();
        model
    };
    model = step(model);
    model = thread::spawn(move || step(model)).join().unwrap();
    assert_eq!(weights(&model).unwrap(), [[0.0; 5]; 2]);
}

/// A parameter is of one sharded model: its memory has one owner.
#[test]
fn a_parameter_of_two_models() {
    let w = Param::new(5);
    let one = Dot { w: w.clone() }.fully_shard(&DeviceMesh::single()).unwrap();
    let error = thread::scope(|scope| {
        let other = scope.spawn(|| Dot { w }.fully_shard(&DeviceMesh::single()).unwrap_err().to_string());
        other.join().unwrap()
    });
    assert!(error.contains("`w`"), "{error}");
    let _: Tensor = one.forward(&full(5, 1.0)).unwrap();
}
