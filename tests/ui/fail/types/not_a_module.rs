use fsdp::FsdpUnit;

struct Rope;

#[derive(FsdpUnit)]
struct Layer {
    field: Rope,
}

fn main() {}
