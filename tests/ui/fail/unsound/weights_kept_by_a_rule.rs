#![forbid(unsafe_code)]

use fsdp::optim::Segment;

struct Keeper<'a> {
    kept: Option<&'a mut [f32]>,
}

fn update<'a>(keeper: &mut Keeper<'a>, segment: &mut Segment<'_>) {
    keeper.kept = Some(segment.weights);
}

fn main() {}
