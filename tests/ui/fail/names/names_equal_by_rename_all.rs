use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(rename_all = "camelCase")]
struct Layer {
    #[fsdp(rename = "upProj")]
    up: Param,
    up_proj: Param,
}

fn main() {}
