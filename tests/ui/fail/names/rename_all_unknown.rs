use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
#[fsdp(rename_all = "Title Case")]
struct Layer {
    up_proj: Param,
}

fn main() {}
