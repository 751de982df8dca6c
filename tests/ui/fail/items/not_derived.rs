use fsdp::FsdpUnit;

struct Layer;

fn assert_module<T: FsdpUnit>() {}

fn main() {
    assert_module::<Layer>();
}
