use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tie_with = embed.weight)]
    weight: Param,
}

fn main() {}
