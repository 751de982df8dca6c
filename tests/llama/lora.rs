//! Adapters beside a frozen Llama, on any number of ranks.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use fsdp::files::TensorFile;
use fsdp::launch::{Launcher, World};
use fsdp::prelude::*;
use fsdp_models::lora::{LoraConfig, Targets, load_adapters, save_adapters, visit_merged_weights};
use fsdp_models::pretrained::{SaveOptions, save_pretrained};
use fsdp_models::{Llama, LlamaConfig, Result};
use fsdp_test_support::{absolute, assert_close};

fn config(tied: bool) -> LlamaConfig {
    LlamaConfig {
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 3,
        num_key_value_heads: 1,
        vocab_size: 31,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: tied,
        max_position_embeddings: 16,
        initializer_range: 0.2,
        head_dim: None,
    }
}

fn lora(targets: &str) -> LoraConfig {
    LoraConfig { rank: 3, alpha: 6.0, targets: targets.parse().unwrap(), dropout: 0.0 }
}

fn adapted(world: &World, lora: &LoraConfig, fsdp: &FsdpConfig) -> Result<Fsdp<Llama>> {
    let mut model = Llama::new(&config(false))?;
    model.add_adapters(lora)?;
    Ok(model.fully_shard_with(&world.data_parallel_mesh(), fsdp)?)
}

fn plain(world: &World, fsdp: &FsdpConfig) -> Result<Fsdp<Llama>> {
    Ok(Llama::new(&config(false))?.fully_shard_with(&world.data_parallel_mesh(), fsdp)?)
}

/// The rows of a global batch of 6 that fall to a rank, and what follows each token.
fn batch(world: &World) -> (Tensor, Tensor) {
    let rows = 6 / world.size();
    let ids = |shift: usize| -> Vec<u32> {
        let row = |row: usize| (0..8).map(move |at| ((row * 11 + (at + shift) * 7) % 31) as u32);
        (world.rank() * rows..(world.rank() + 1) * rows).flat_map(row).collect()
    };
    let tensor = |shift| Tensor::from_vec(ids(shift), (rows, 8), &Device::Cpu).unwrap();
    (tensor(0), tensor(1))
}

/// Gives the `B` matrices values other than zero.
fn stir(model: &mut Fsdp<Llama>) -> Result<()> {
    let units: Vec<_> = model.layout().units.iter().map(|unit| unit.path.clone()).collect();
    for unit in units {
        model.with_full_params(&unit, |params| {
            for param in params.iter_mut().filter(|param| param.spec.name.contains("lora_B")) {
                for (at, value) in param.values.iter_mut().enumerate() {
                    *value = ((at * 37 + param.spec.name.len()) % 19) as f32 / 50.0 - 0.18;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

type Values = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn weights(model: &Fsdp<Llama>) -> Result<Values> {
    let mut values = Values::new();
    model.visit_weights(|spec, elements| {
        values.insert(spec.name.clone(), (spec.shape.clone(), elements.to_vec()));
        Ok(())
    })?;
    Ok(values)
}

fn merged(model: &Fsdp<Llama>) -> Result<Values> {
    let mut values = Values::new();
    visit_merged_weights(model, |spec, elements| {
        values.insert(spec.name.clone(), (spec.shape.clone(), elements.to_vec()));
        Ok(())
    })?;
    Ok(values)
}

fn load(model: &mut Fsdp<Llama>, values: &Values) -> Result<()> {
    Ok(model.load_weights(|spec, range, out| {
        out.copy_from_slice(&values[&spec.name].1[range]);
        Ok(())
    })?)
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

fn on_ranks<T: Send>(ranks: usize, run: impl Fn(World) -> Result<T> + Sync) -> Vec<T> {
    Launcher::new().ranks(ranks).run(run).unwrap()
}

fn is_adapter(name: &str) -> bool {
    name.contains(".lora_")
}

#[test]
fn a_new_adapter_changes_no_bit() {
    for ranks in [1, 2, 3] {
        for targets in ["q_proj,v_proj", "gate_proj", "all-linear", "lm_head,o_proj"] {
            on_ranks(ranks, |world| {
                let fsdp = FsdpConfig::default();
                let (adapted, plain) = (adapted(&world, &lora(targets), &fsdp)?, plain(&world, &fsdp)?);
                let batch = batch(&world);
                let losses: [Tensor; 2] = [adapted.forward(&batch)?, plain.forward(&batch)?];
                assert_eq!(bits(&losses[0]), bits(&losses[1]), "{targets}");
                let logits: [Tensor; 2] = [adapted.evaluate(&batch.0)?, plain.evaluate(&batch.0)?];
                assert_eq!(bits(&logits[0]), bits(&logits[1]), "{targets}");
                Ok(())
            });
        }
    }
}

#[test]
fn merged_weights_compute_what_the_adapters_do() {
    for ranks in [1, 2, 3] {
        on_ranks(ranks, |world| {
            let fsdp = FsdpConfig::default();
            let (mut adapted, mut plain) = (
                adapted(
                    &world,
                    &lora("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"),
                    &fsdp,
                )?,
                plain(&world, &fsdp)?,
            );
            stir(&mut adapted)?;
            let (ids, _) = batch(&world);
            let before: Tensor = plain.evaluate(&ids)?;
            let merged = merged(&adapted)?;
            assert_eq!(merged.keys().collect::<Vec<_>>(), weights(&plain)?.keys().collect::<Vec<_>>());
            load(&mut plain, &merged)?;
            let [ours, theirs]: [Tensor; 2] = [adapted.evaluate(&ids)?, plain.evaluate(&ids)?];
            let apart = |a: &Tensor, b: &Tensor| -> Result<f32> {
                Ok((a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?)
            };
            assert!(apart(&before, &theirs)? > 0.1, "the adapters do nothing");
            assert!(apart(&ours, &theirs)? < 2e-5, "{}", apart(&ours, &theirs)?);
            Ok(())
        });
    }
}

/// With `W' = W + s B A`, the gradients are `dB = s dW' Aᵀ` and `dA = s Bᵀ dW'`: `dW'` is that of the plain model
/// with merged weights.
#[test]
fn gradients_follow_from_those_of_the_merged_weights() {
    for (ranks, recompute) in [(1, Recompute::None), (2, Recompute::Unit), (3, Recompute::None)] {
        on_ranks(ranks, |world| {
            let fsdp = FsdpConfig { recompute, ..FsdpConfig::default() };
            let (mut adapted, mut plain) = (
                adapted(
                    &world,
                    &lora("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"),
                    &fsdp,
                )?,
                plain(&world, &fsdp)?,
            );
            stir(&mut adapted)?;
            load(&mut plain, &merged(&adapted)?)?;
            let gradients = |model: &Fsdp<Llama>| -> Result<BTreeMap<String, Tensor>> {
                let loss: Tensor = model.forward(&batch(&world))?;
                model.backward(&loss)?;
                let mut gradients = BTreeMap::new();
                model.visit_gradients(|spec, values| {
                    let tensor = Tensor::from_slice(values, spec.shape.as_slice(), &Device::Cpu)?;
                    gradients.insert(spec.name.clone(), tensor);
                    Ok(())
                })?;
                Ok(gradients)
            };
            let (ours, theirs) = (gradients(&adapted)?, gradients(&plain)?);
            assert_eq!(ours.len(), 2 * (2 * 7 + 1));
            assert!(ours.keys().all(|name| is_adapter(name)));
            let weights = weights(&adapted)?;
            for (name, gradient) in &ours {
                let (projection, half) = name.rsplit_once(".lora_").unwrap();
                let dense = &theirs[&format!("{projection}.weight")];
                let other = |half: &str| -> Result<Tensor> {
                    let (shape, values) = &weights[&format!("{projection}.lora_{half}.weight")];
                    Ok(Tensor::from_slice(values, shape.as_slice(), &Device::Cpu)?)
                };
                let expected = match half {
                    "A.weight" => other("B")?.t()?.matmul(dense)?,
                    _ => dense.matmul(&other("A")?.t()?)?,
                };
                let expected = (expected * 2.0)?;
                let norm =
                    |t: &Tensor| -> Result<f32> { Ok(t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>()?) };
                let (apart, size) = (norm(&(gradient - &expected)?)?, norm(&expected)?);
                assert!(size > 1e-4 && apart < 2e-5 * size.max(1.0), "{name}: {apart} of {size}");
            }
            Ok(())
        });
    }
}

#[test]
fn only_the_adapters_are_trained_and_only_they_have_state() {
    for strategy in Strategy::ALL {
        for ranks in [1, 2, 3] {
            on_ranks(ranks, |world| {
                let fsdp = FsdpConfig { strategy, strict_gradients: true, ..FsdpConfig::default() };
                let mut model = adapted(&world, &lora("all-linear"), &fsdp)?;
                let mut optimizer = model.optimizer(AdamW::default().lr(0.02))?;
                let before = weights(&model)?;
                let mut losses = Vec::new();
                for _ in 0..12 {
                    let loss: Tensor = model.forward(&batch(&world))?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                    losses.push(loss.to_scalar::<f32>()?);
                }
                assert!(losses[11] < losses[0] - 0.3, "{losses:?}");
                for (name, (_, after)) in weights(&model)? {
                    assert_eq!(after != before[&name].1, is_adapter(&name), "{name}");
                }
                let trained: usize =
                    model.layout().buckets.iter().filter(|b| b.key.requires_grad).map(|b| b.size).sum();
                let held = trained * 4 / if model.strategy() == Strategy::NoShard { 1 } else { ranks };
                for report in model.memory(2) {
                    let bytes = report.usage.current;
                    match report.usage.category.name() {
                        "optimizer_state" => assert_eq!(bytes, 2 * held),
                        "main_grads" => {
                            let whole = !model.strategy().shards_grads();
                            assert_eq!(bytes, if whole { trained * 4 } else { held });
                        }
                        _ => {}
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn sixteen_bit_models_keep_main_weights_of_the_adapters_alone() {
    on_ranks(2, |world| {
        let fsdp = FsdpConfig { precision: MixedPrecision::BF16, ..FsdpConfig::default() };
        let mut model = adapted(&world, &lora("all-linear"), &fsdp)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.02))?;
        let mut losses = Vec::new();
        for _ in 0..12 {
            let loss: Tensor = model.forward(&batch(&world))?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert!(losses[11] < losses[0] - 0.3, "{losses:?}");
        let trained: usize =
            model.layout().buckets.iter().filter(|b| b.key.requires_grad).map(|b| b.size).sum();
        let memory = model.memory(2);
        let main = memory.iter().find(|report| report.usage.category.name() == "main_weights").unwrap();
        assert_eq!(main.usage.current, trained * 4 / 2);
        Ok(())
    });
}

#[test]
fn dropped_inputs_are_the_same_on_any_number_of_ranks() {
    let losses = |ranks: usize| -> f32 {
        let all = on_ranks(ranks, |world| {
            let lora = LoraConfig { dropout: 0.3, ..lora("all-linear") };
            let mut model = adapted(&world, &lora, &FsdpConfig::default())?;
            stir(&mut model)?;
            model.set_first_sample((world.rank() * 6 / ranks) as u64);
            let loss: Tensor = model.forward(&batch(&world))?;
            Ok(loss.to_scalar::<f32>()?)
        });
        all.iter().sum::<f32>() / ranks as f32
    };
    let one = losses(1);
    let without = on_ranks(1, |world| {
        let mut model = adapted(&world, &lora("all-linear"), &FsdpConfig::default())?;
        stir(&mut model)?;
        let loss: Tensor = model.forward(&batch(&world))?;
        Ok(loss.to_scalar::<f32>()?)
    })[0];
    assert!((one - without).abs() > 1e-3, "nothing was dropped: {one}");
    for ranks in [2, 3] {
        assert_close(&losses(ranks), &one, absolute(1e-5), format!("{ranks} ranks"));
    }
}

#[test]
fn adapters_saved_alone_are_loaded_on_other_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("adapters");
    let saved = on_ranks(2, |world| {
        let mut model = adapted(
            &world,
            &lora("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"),
            &FsdpConfig::default(),
        )?;
        stir(&mut model)?;
        save_adapters(&model, &dir, Some("base"))?;
        weights(&model)
    });
    let file = TensorFile::open(&dir.join("adapter_model.safetensors")).unwrap();
    assert_eq!(file.names().count(), 2 * (2 * 7 + 1));
    let name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight";
    assert_eq!(file.shape(name), Some(&[8, 3][..]));

    let all = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head";
    let lora = LoraConfig::from_peft(&dir).unwrap();
    assert_eq!(lora, self::lora(all));
    let loaded = on_ranks(3, |world| {
        let mut model = adapted(&world, &lora, &FsdpConfig::default())?;
        let report = load_adapters(&mut model, &dir)?;
        assert_eq!((report.loaded, report.has_remarks()), (30, false));
        weights(&model)
    });
    assert_eq!(loaded[0], saved[0]);

    let other = LoraConfig { rank: 2, targets: Targets::default(), ..lora };
    let outcome = Launcher::new().ranks(2).run(|world| -> Result<()> {
        let mut model = adapted(&world, &other, &FsdpConfig::default())?;
        load_adapters(&mut model, &dir)?;
        Ok(())
    });
    let message = outcome.unwrap_err().to_string();
    assert!(message.contains("q_proj.lora_A.weight (model [2, 24], file [3, 24])"), "{message}");
    assert!(message.contains("22 unexpected: base_model.model.lm_head"), "{message}");
}

/// Adapters of these modules in PEFT's files, with `more` tensors beside theirs.
fn write_peft(
    dir: &std::path::Path,
    modules: &serde_json::Value,
    names: &[&str],
    more: &[(&str, &[usize], &[f32])],
) -> Values {
    let mut tensors = Values::new();
    for name in names {
        let (rows, columns) = match name.rsplit('.').next().unwrap() {
            "lm_head" => (31, 24),
            "k_proj" | "v_proj" => (8, 24),
            "q_proj" | "o_proj" => (24, 24),
            "down_proj" => (24, 40),
            _ => (40, 24),
        };
        for (half, shape) in [("A", vec![3, columns]), ("B", vec![rows, 3])] {
            let len = shape[0] * shape[1];
            let values = (0..len).map(|at| ((at * 29 + name.len()) % 23) as f32 / 64.0 - 0.17).collect();
            tensors.insert(format!("{name}.lora_{half}.weight"), (shape, values));
        }
    }
    let stored: Vec<(String, &[usize], &[f32])> = tensors
        .iter()
        .map(|(name, (shape, values))| (format!("base_model.model.{name}"), &shape[..], &values[..]))
        .chain(more.iter().map(|(name, shape, values)| (format!("base_model.model.{name}"), *shape, *values)))
        .collect();
    let stored: Vec<_> =
        stored.iter().map(|(name, shape, values)| (name.as_str(), *shape, *values)).collect();
    fsdp::files::save_f32(&dir.join("adapter_model.safetensors"), &stored).unwrap();
    let config = serde_json::json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "bias": "none",
        "modules_to_save": [], "target_modules": modules, "layers_to_transform": null, "use_dora": false, "rank_pattern": {},
        "alora_invocation_tokens": null, "init_lora_weights": true, "peft_version": "0.21.0", "inference_mode": true,
    });
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    tensors
}

#[test]
fn modules_are_named_in_any_way_that_peft_writes() {
    let q = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"];
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    for (modules, names) in [
        (json(r#"["self_attn.q_proj"]"#), &q[..]),
        (json(r#"["model.layers.1.self_attn.q_proj"]"#), &q[1..]),
        (json(r#"["0.mlp.down_proj", "q_proj"]"#), &[q[0], q[1], "model.layers.0.mlp.down_proj"][..]),
        (json(r#"".*layers\\.1\\.self_attn\\.(q|k)_proj""#), &[q[1], "model.layers.1.self_attn.k_proj"][..]),
        (json(r#"["lm_head", "self_attn.q_proj"]"#), &[q[0], q[1], "lm_head"][..]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let expected = write_peft(dir.path(), &modules, names, &[]);
        let lora = LoraConfig::from_peft(dir.path()).unwrap();
        for ranks in [1, 2] {
            on_ranks(ranks, |world| {
                let mut model = adapted(&world, &lora, &FsdpConfig::default())?;
                load_adapters(&mut model, dir.path())?;
                let mut adapters = weights(&model)?;
                adapters.retain(|name, _| is_adapter(name));
                assert_eq!(adapters, expected, "{modules}");
                // And written so again.
                let again = dir.path().join("again");
                save_adapters(&model, &again, None)?;
                assert_eq!(LoraConfig::from_peft(&again)?, lora);
                Ok(())
            });
        }
    }
}

/// PEFT saves an adapted head with the weight that it wraps, a vocabulary that was changed without one, and loads them over the
/// model's own.
#[test]
fn weights_that_peft_saves_whole_are_loaded_over_the_models_own() {
    let values: Vec<f32> = (0..31 * 24).map(|at| at as f32 / 512.0).collect();
    let names = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"];
    for (saved, set) in [
        ("lm_head.base_layer.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let modules = serde_json::json!(["q_proj", "lm_head"]);
        write_peft(dir.path(), &modules, &names, &[(saved, &[31, 24], &values)]);
        let lora = LoraConfig::from_peft(dir.path()).unwrap();
        for ranks in [1, 3] {
            on_ranks(ranks, |world| {
                let mut model = adapted(&world, &lora, &FsdpConfig::default())?;
                let before = weights(&model)?;
                let report = load_adapters(&mut model, dir.path())?;
                let expected = format!("7 tensors were loaded; {set} was set as well: the file has it whole");
                assert_eq!(report.to_string(), expected);
                for (name, (_, after)) in weights(&model)? {
                    if name == set {
                        assert_eq!(after, values);
                    } else {
                        assert_eq!(after != before[&name].1, is_adapter(&name), "{name}");
                    }
                }
                Ok(())
            });
        }
        write_peft(dir.path(), &modules, &names, &[(saved, &[31, 23], &values[..31 * 23])]);
        let message = Launcher::new().ranks(2).run(|world| -> Result<()> {
            load_adapters(&mut adapted(&world, &lora, &FsdpConfig::default())?, dir.path())?;
            Ok(())
        });
        let message = message.unwrap_err().to_string();
        assert!(message.contains("(model [31, 24], file [31, 23])"), "{message}");
    }
}

#[test]
fn an_adapted_model_is_not_saved_as_a_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    let messages = on_ranks(2, |world| {
        let model = adapted(&world, &lora("q_proj,v_proj"), &FsdpConfig::default())?;
        let config = config(false).to_json();
        let saved = save_pretrained(&model, &config, &dir.path().join("plain"), &SaveOptions::default());
        Ok(saved.unwrap_err().to_string())
    });
    let expected = "the model has adapters, 8 tensors of which `model.layers.0.self_attn.q_proj.lora_A.weight` is the \
                    first: `save_merged` saves it with them merged, `save_adapters` saves them alone";
    assert_eq!(messages, [expected, expected]);
    assert!(!dir.path().join("plain").exists());
}

#[test]
fn a_model_without_adapters_saves_none() {
    let model = Llama::new(&config(true)).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
    let outcome = save_adapters(&model, &std::env::temp_dir().join("never-made"), None);
    assert_eq!(outcome.unwrap_err().to_string(), "the model has no adapters");
}
