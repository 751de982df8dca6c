use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(rename_all = "camelcase")]
struct Layer {
    up_proj: Param,
}

fn main() {}
