use fsdp::FsdpUnit;

trait Family {
    type Block;
}

struct Blocks<F: Family>(F::Block);

#[derive(FsdpUnit)]
struct Model<F: Family> {
    blocks: [Blocks<F>; 2],
}

fn main() {}
