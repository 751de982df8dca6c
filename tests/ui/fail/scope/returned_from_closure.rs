use fsdp::Scope;

fn within<R>(forward: impl FnOnce(&Scope<'_>) -> R) -> R {
    panic!("{}", std::any::type_name_of_val(&forward))
}

fn main() {
    let _kept = within(|scope| scope);
}
