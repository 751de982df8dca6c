use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
struct Inner {
    #[fsdp(froze)]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Outer {
    inner: Inner,
}

fn assert_module<T: FsdpUnit>() {}

fn main() {
    assert_module::<Inner>();
    assert_module::<Outer>();
}
