use fsdp::Scope;

fn forward(scope: Scope<'static>) {
    std::thread::spawn(move || drop(scope));
}

fn main() {}
