use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
enum Ffn {
    Dense(Param),
    Experts { #[fsdp(exprt)] list: Vec<Param> },
}

fn main() {}
