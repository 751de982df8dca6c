use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
#[fsdp(bound = "T FsdpUnit")]
struct Layer<T> {
    inner: T,
}

fn main() {}
