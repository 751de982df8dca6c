use fsdp::Scope;

fn main() {
    let _: Scope<'_> = Default::default();
}
