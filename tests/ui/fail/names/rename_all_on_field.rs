use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(rename_all = "camelCase")]
    weight: Param,
}

fn main() {}
