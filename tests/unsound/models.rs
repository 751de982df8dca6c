//! Small models whose gradients are known.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

/// The sum of `x w`.
#[derive(FsdpUnit)]
pub struct Dot {
    pub w: Param,
}

impl Forward for Dot {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        (x * self.w.tensor(scope)?)?.sum_all()
    }
}

/// Units side by side: the sum of what they give.
#[derive(FsdpUnit)]
pub struct Dots {
    pub units: Vec<Unit<Dot>>,
}

impl Dots {
    /// `count` units of `len` ones.
    pub fn new(count: usize, len: usize) -> Dots {
        let unit = || Unit::new(Dot { w: Param::new(len).with_init(Init::Ones) });
        Dots { units: (0..count).map(|_| unit()).collect() }
    }
}

impl Forward for Dots {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut sum = Tensor::zeros((), DType::F32, x.device())?;
        for unit in &self.units {
            sum = (sum + unit.forward(x, &(), scope)?)?;
        }
        Ok(sum)
    }
}

/// A model that knows itself: its forward calls back.
#[derive(FsdpUnit)]
pub struct Caller {
    dots: Dots,
    #[fsdp(skip)]
    back: RefCell<Option<Back>>,
}

type Call = Box<dyn Fn(&Fsdp<Caller>)>;

/// The model around it, and what to do with it.
struct Back {
    model: Weak<Fsdp<Caller>>,
    call: Call,
}

impl Forward for Caller {
    fn forward(&self, x: &Tensor, context: &(), scope: &Scope<'_>) -> Result<Tensor> {
        if let Some(Back { model, call }) = &*self.back.borrow() {
            call(&model.upgrade().expect("its forward is running"));
        }
        self.dots.forward(x, context, scope)
    }
}

/// A sharded model whose forward makes this call.
pub fn caller(config: &FsdpConfig, call: impl Fn(&Fsdp<Caller>) + 'static) -> fsdp::Result<Rc<Fsdp<Caller>>> {
    let model = Caller { dots: Dots::new(2, 5), back: RefCell::default() };
    let model = Rc::new(model.fully_shard_with(&DeviceMesh::single(), config)?);
    *model.module().back.borrow_mut() = Some(Back { model: Rc::downgrade(&model), call: Box::new(call) });
    Ok(model)
}

pub fn full(len: usize, value: f32) -> Tensor {
    Tensor::full(value, len, &Device::Cpu).unwrap()
}

/// All weights, in order.
pub fn weights<M>(model: &Fsdp<M>) -> fsdp::Result<Vec<Vec<f32>>> {
    let mut all = Vec::new();
    model.visit_weights(|_, values| {
        all.push(values.to_vec());
        Ok(())
    })?;
    Ok(all)
}

/// All gradients, in order.
pub fn gradients<M>(model: &Fsdp<M>) -> fsdp::Result<Vec<Vec<f32>>> {
    let mut all = Vec::new();
    model.visit_gradients(|_, values| {
        all.push(values.to_vec());
        Ok(())
    })?;
    Ok(all)
}
