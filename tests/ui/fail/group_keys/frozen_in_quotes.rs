use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(frozen = "false")]
    weight: Param,
}

fn main() {}
