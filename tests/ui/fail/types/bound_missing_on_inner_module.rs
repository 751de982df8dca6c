use fsdp::FsdpUnit;

#[derive(FsdpUnit)]
struct Inner<T> {
    module: T,
}

#[derive(FsdpUnit)]
struct Outer<T> {
    inner: Inner<T>,
}

fn main() {}
