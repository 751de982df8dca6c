use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Layer {
    vocabulary: std::collections::HashSet<u32>,
}

fn main() {}
