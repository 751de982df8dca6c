#[derive(fsdp::FsdpUnit)]
fn forward() {}

fn main() {}
