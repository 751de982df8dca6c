use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
enum Ffn {
    #[fsdp(frozen)]
    Dense(Param),
    Identity,
}

fn main() {}
