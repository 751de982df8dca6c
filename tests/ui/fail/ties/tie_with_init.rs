use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(tie_with = "embed.weight", init = zeros)]
    weight: Param,
}

fn main() {}
