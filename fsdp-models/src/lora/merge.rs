//! Merges adapters into the weights of a plain model.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp::Fsdp;
use fsdp::engine::FullParam;
use fsdp::spec::ParamSpec;

use crate::adapter::adapter_of;
use crate::llama::Llama;
use crate::pretrained::{Pretrained, SaveOptions};

/// Shows every parameter of the plain model whole to `visit`, in f32, on every rank: where there is an adapter,
/// `weight + (alpha / rank) B A`. The adapters themselves are not shown. Every rank must call it.
///
/// For a model without adapters it is [`Fsdp::visit_weights`]. The parameters of one unit are whole at a time.
///
/// # Errors
/// Those of `visit` and of the gathers.
pub fn visit_merged_weights(
    model: &Fsdp<Llama>,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> fsdp::Result<()>,
) -> fsdp::Result<()> {
    let Some(lora) = model.module().lora() else {
        return model.visit_weights(visit);
    };
    for unit in &model.layout().units {
        let params = model.full_params(&unit.path)?;
        let mut adapters: HashMap<String, Pair> = HashMap::new();
        for param in &params {
            if let Some((projection, half)) = adapter_of(&param.spec.name) {
                let pair = adapters.entry(format!("{projection}.weight")).or_default();
                pair[half as usize] = Some(matrix(param)?);
            }
        }
        for FullParam { spec, values } in params.iter().filter(|param| adapter_of(&param.spec.name).is_none())
        {
            match adapters.remove(&spec.name) {
                Some([Some(a), Some(b)]) => visit(spec, &merged(values, &a, &b, lora.scale())?)?,
                _ => visit(spec, values)?,
            }
        }
    }
    Ok(())
}

impl Pretrained {
    /// Saves the model with its adapters merged into the weights, as a plain model that any Hugging Face tool loads (see
    /// [`Pretrained::save`] and [`visit_merged_weights`]). Every rank must call it.
    ///
    /// # Errors
    /// As for [`save_pretrained`](crate::pretrained::save_pretrained).
    pub fn save_merged(
        &self,
        model: &Fsdp<Llama>,
        dir: &Path,
        options: &SaveOptions<'_>,
    ) -> crate::Result<()> {
        let params = model.layout().params.iter().filter(|spec| adapter_of(&spec.name).is_none());
        let params: Vec<&ParamSpec> = params.collect();
        self.save_plain(model, &params, dir, options, |visit| visit_merged_weights(model, visit))
    }
}

/// `A` and `B` of one projection.
type Pair = [Option<Tensor>; 2];

fn matrix(param: &FullParam) -> fsdp::Result<Tensor> {
    Ok(Tensor::from_slice(&param.values, param.spec.shape.as_slice(), &Device::Cpu)?)
}

fn merged(weight: &[f32], a: &Tensor, b: &Tensor, scale: f64) -> fsdp::Result<Vec<f32>> {
    let update: Vec<f32> = (b.matmul(a)? * scale)?.flatten_all()?.to_vec1()?;
    Ok(weight.iter().zip(update).map(|(weight, update)| weight + update).collect())
}
