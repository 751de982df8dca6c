use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
#[fsdp(bound = "")]
struct Layer<T> {
    inner: T,
}

fn main() {}
