use fsdp::Scope;

fn copy<'a>(scope: &Scope<'a>) -> Scope<'a> {
    scope.clone()
}

fn main() {}
