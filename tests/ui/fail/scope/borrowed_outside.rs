use fsdp::Scope;

fn forward<'a>(kept: &mut Vec<&'a Scope<'a>>, scope: &Scope<'_>) {
    kept.push(scope);
}

fn main() {}
