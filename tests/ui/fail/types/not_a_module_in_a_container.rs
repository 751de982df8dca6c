use fsdp::FsdpUnit;

struct Rope;

#[derive(FsdpUnit)]
struct Layer {
    field: Vec<Option<Rope>>,
}

fn main() {}
