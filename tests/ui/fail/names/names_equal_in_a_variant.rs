use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
enum Ffn {
    Dense(Param, #[fsdp(rename = "0")] Param),
    Identity,
}

fn main() {}
