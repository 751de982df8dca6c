use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(rename_all = "camelCase", rename_all = "camelCase")]
struct Layer {
    up_proj: Param,
}

fn main() {}
