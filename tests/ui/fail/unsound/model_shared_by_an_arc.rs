#![forbid(unsafe_code)]

use fsdp::prelude::*;
use std::sync::Arc;

#[derive(FsdpUnit)]
struct Model {
    w: Param,
}

fn visit(model: Arc<Fsdp<Model>>) {
    std::thread::spawn(move || model.visit_weights(|_, _| Ok(())).is_ok());
}

fn main() {}
