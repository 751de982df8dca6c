use fsdp::Scope;

struct Cache<'a> {
    scope: Option<&'a Scope<'a>>,
}

fn forward<'a>(cache: &mut Cache<'a>, scope: &Scope<'_>) {
    cache.scope = Some(scope);
}

fn main() {}
