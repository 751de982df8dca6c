use std::marker::PhantomData;

use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozen)]
    phantom: PhantomData<f32>,
}

fn main() {}
