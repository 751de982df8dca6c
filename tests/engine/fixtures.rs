//! Models whose gradients are plain sums, and a way to run them on ranks.

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use fsdp::comm::tcp::Place;
use fsdp::launch::Launcher;
use fsdp::prelude::*;

/// One unit with one parameter `w`; its loss is `sum_i w_i * x_i`, so that dloss/dw = x.
#[derive(FsdpUnit)]
pub struct Dot {
    pub w: Param,
}

impl Dot {
    pub fn zeros(n: usize) -> Unit<Dot> {
        Dot::with(n, 0.0)
    }

    pub fn with(n: usize, value: f32) -> Unit<Dot> {
        Unit::new(Dot { w: Param::new(n).with_init(Init::Constant(value)) })
    }
}

impl Forward for Dot {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        (x.to_dtype(w.dtype())? * w)?.sum_all()
    }
}

/// Units `a` and `b`; the loss is the sum of the losses of those used.
#[derive(FsdpUnit)]
pub struct Two {
    pub a: Unit<Dot>,
    pub b: Unit<Dot>,
}

impl Two {
    pub fn zeros(n: usize) -> Two {
        Two { a: Dot::zeros(n), b: Dot::zeros(n) }
    }
}

/// Which units to use.
pub type Used = (bool, bool, Tensor);

impl Forward<(), Used> for Two {
    fn forward(&self, (a, b, x): &Used, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        if *a {
            loss = (loss + self.a.forward(x, &(), scope)?)?;
        }
        if *b {
            loss = (loss + self.b.forward(x, &(), scope)?)?;
        }
        Ok(loss)
    }
}

/// A root that is nothing but a list of [`Dot`] units, each with its own length; the input is a list too.
#[derive(FsdpUnit)]
pub struct Dots {
    pub units: Vec<Unit<Dot>>,
}

impl Forward<(), Vec<Tensor>> for Dots {
    fn forward(&self, xs: &Vec<Tensor>, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for (unit, x) in self.units.iter().zip(xs) {
            loss = (loss + unit.forward(x, &(), scope)?.to_dtype(DType::F32)?)?;
        }
        Ok(loss)
    }
}

pub fn dot(n: usize) -> Dots {
    Dots { units: vec![Dot::zeros(n)] }
}

/// A vector of `n` elements `value`.
pub fn full(n: usize, value: f32) -> Tensor {
    Tensor::full(value, n, &Device::Cpu).unwrap()
}

pub fn config(strategy: Strategy) -> FsdpConfig {
    FsdpConfig { strategy, poison: true, ..FsdpConfig::default() }
}

/// Runs `main` on `ranks` ranks with a short time-out: threads that share their slices, or, with `FSDP_JOINED=1`, threads that are
/// joined as processes are.
pub fn on_ranks<T: Send>(
    ranks: usize,
    main: impl Fn(fsdp::launch::World) -> fsdp::Result<T> + Send + Sync,
) -> Vec<T> {
    if std::env::var_os("FSDP_JOINED").is_some() {
        return on_joined_ranks(ranks, main);
    }
    launcher(ranks).run(main).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `main` on `ranks` ranks that exchange as processes of one machine do: by TCP, and in memory that they share.
pub fn on_joined_ranks<T: Send>(
    ranks: usize,
    main: impl Fn(fsdp::launch::World) -> fsdp::Result<T> + Send + Sync,
) -> Vec<T> {
    static WORLDS: AtomicU16 = AtomicU16::new(0);
    // An address for each world, so that no two of this program want one port.
    let [high, low] = WORLDS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let host = format!("127.1.{high}.{low}");
    let free = std::net::TcpListener::bind((host.as_str(), 0)).expect("there is a free port");
    let port = free.local_addr().expect("it has an address").port();
    drop(free);
    let main = &main;
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let place = Place { rank, size: ranks, local_rank: rank, address: (host.clone(), port) };
            scope.spawn(move || launcher(ranks).join(&place, main))
        };
        let all: Vec<_> = (0..ranks).map(rank).collect();
        let ends = all.into_iter().map(|rank| rank.join().expect("a launch does not panic"));
        ends.collect::<std::result::Result<_, _>>().unwrap_or_else(|error| panic!("{error}"))
    })
}

pub fn launcher(ranks: usize) -> Launcher {
    Launcher::new().ranks(ranks).timeout(Duration::from_secs(10))
}

/// The weights by name, whole.
pub fn weights<M>(model: &Fsdp<M>) -> fsdp::Result<Vec<(String, Vec<f32>)>> {
    let mut all = Vec::new();
    model.visit_weights(|spec, values| {
        all.push((spec.name.clone(), values.to_vec()));
        Ok(())
    })?;
    Ok(all)
}

/// The gradients by name, whole.
pub fn gradients<M>(model: &Fsdp<M>) -> fsdp::Result<Vec<(String, Vec<f32>)>> {
    let mut all = Vec::new();
    model.visit_gradients(|spec, values| {
        all.push((spec.name.clone(), values.to_vec()));
        Ok(())
    })?;
    Ok(all)
}

/// What a test expects of [`weights`] or [`gradients`].
pub fn named(entries: &[(&str, &[f32])]) -> Vec<(String, Vec<f32>)> {
    entries.iter().map(|(name, values)| (name.to_string(), values.to_vec())).collect()
}
