use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Layer {
    #[fsdp(rename = "model..norm")]
    weight: Param,
}

fn main() {}
