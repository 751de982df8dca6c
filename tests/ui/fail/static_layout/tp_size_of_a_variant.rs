use fsdp::prelude::*;

#[derive(FsdpUnit)]
#[fsdp(tp_size = 4)]
enum Ffn {
    Gated {
        #[fsdp(tp = column, shape = [12, 4])]
        gate: Param,
    },
    Plain {
        #[fsdp(tp = column, shape = [10, 4])]
        up: Param,
    },
}

fn main() {}
