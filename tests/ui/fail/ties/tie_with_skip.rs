use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tie_with = "embed.weight", skip)]
    weight: Param,
}

fn main() {}
