//! The whole model in tensors of rank 0, and back.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fsdp::prelude::*;

use crate::model::{Net, input, step};

type State = BTreeMap<String, Tensor>;

fn bits(state: &State) -> BTreeMap<&str, (DType, Vec<u64>)> {
    let bits = |tensor: &Tensor| {
        let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        candle_core::Result::Ok((tensor.dtype(), values.into_iter().map(f64::to_bits).collect()))
    };
    state.iter().map(|(name, tensor)| (name.as_str(), bits(tensor).unwrap())).collect()
}

fn model(ranks: usize, config: &FsdpConfig, from: Option<&State>, train: bool) -> State {
    let states = launch::local(ranks, |world| -> fsdp::Result<Option<State>> {
        let mut model = Net::new(2).fully_shard_with(&world.data_parallel_mesh(), config)?;
        if let Some(from) = from {
            let wrong = model.load_full_state_dict((world.rank() == 0).then_some(from), true)?;
            assert!(wrong.is_empty());
        }
        if train {
            let mut optimizer = model.optimizer(AdamW::default())?;
            step(&mut model, &mut optimizer, &input(world.rank(), 0))?;
        }
        model.full_state_dict()
    })
    .unwrap();
    assert!(states[1..].iter().all(Option::is_none));
    states.into_iter().next().flatten().unwrap()
}

#[test]
fn the_whole_model_is_on_rank_0_and_goes_to_any_number_of_ranks() {
    for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
        let config = FsdpConfig { precision, ..FsdpConfig::default() };
        let trained = model(2, &config, None, true);
        let names: Vec<&str> = trained.keys().map(String::as_str).collect();
        let expected = [
            "counts",
            "exact",
            "gain",
            "head",
            "layers.0.bias",
            "layers.0.scale",
            "layers.0.weight",
            "layers.1.bias",
            "layers.1.scale",
            "layers.1.weight",
            "mean",
        ];
        assert_eq!(names, expected);
        assert_eq!((trained["counts"].dtype(), trained["layers.0.weight"].dims()), (DType::U32, &[5, 5][..]));
        for (ranks, strategy) in (1..=4).flat_map(|ranks| Strategy::ALL.map(|strategy| (ranks, strategy))) {
            let config = FsdpConfig { strategy, seed: 5, ..config.clone() };
            assert_eq!(bits(&model(ranks, &config, Some(&trained), false)), bits(&trained));
        }
    }
}

/// Ties, frozen weights and what owns which element are the layout's, which a load does not touch.
#[test]
fn a_step_after_a_load_is_that_of_the_run_it_came_from() {
    for (ranks, strategy) in [(1, Strategy::default()), (2, Strategy::Optim), (3, Strategy::default())] {
        let config = FsdpConfig { strategy, seed: 1, ..FsdpConfig::default() };
        let other = FsdpConfig { seed: 2, ..config.clone() };
        let start = model(1, &config, None, false);
        let stepped = model(ranks, &config, None, true);
        assert_ne!(bits(&stepped), bits(&start));
        assert_eq!(bits(&model(ranks, &other, Some(&start), true)), bits(&stepped));
    }
}

#[test]
fn what_does_not_fit_is_told_on_all_ranks() {
    let config = FsdpConfig::default();
    let mut state = model(1, &config, None, false);
    state.remove("gain");
    state.insert("more".into(), Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap());
    state.insert("exact".into(), Tensor::zeros((3, 7), DType::F64, &Device::Cpu).unwrap());
    // A buffer of another dtype is not converted.
    state.insert("mean".into(), Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap());
    let errors = launch::local(3, |world| -> fsdp::Result<String> {
        let mut model = Net::new(2).fully_shard(&world.data_parallel_mesh())?;
        let mine = (world.rank() == 0).then_some(&state);
        let error = model.load_full_state_dict(mine, true).unwrap_err().to_string();
        let wrong = model.load_full_state_dict(mine, false)?;
        assert_eq!((wrong.missing, wrong.unexpected), (vec!["gain".to_owned()], vec!["more".to_owned()]));
        assert_eq!(model.module().mean.to_vec2::<f64>()?, [[0.5, -1.5]]);
        model.visit_weights(|spec, values| {
            let expected = match spec.name.as_str() {
                "gain" => 1.0,
                "exact" => 0.0,
                _ => return Ok(()),
            };
            assert_eq!(values[0], expected, "{}", spec.name);
            Ok(())
        })?;
        Ok(error)
    })
    .unwrap();
    assert!(errors.iter().all(|error| *error == errors[0]));
    assert!(
        errors[0].contains("1 missing: gain\n  1 unexpected: more\n  2 of another dtype: exact"),
        "{}",
        errors[0]
    );
}

#[test]
fn rank_0_must_have_one_and_an_error_of_a_visit_is_one_on_all_ranks() {
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = Net::new(1).fully_shard(&world.data_parallel_mesh())?;
        let error = model.load_full_state_dict(None, true).unwrap_err().to_string();
        assert!(error.ends_with("it must have one, but came with `None`"), "{error}");
        let visit = |name: &str, _: Tensor| Err(fsdp::Error::Usage(format!("no room for `{name}`")));
        let error = model.visit_full_state(visit).unwrap_err().to_string();
        assert!(error.contains("no room for `head`"), "{error}");
        Ok(())
    })
    .unwrap();
}
