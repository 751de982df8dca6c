use fsdp::Scope;

struct Cache {
    scope: Option<Scope<'static>>,
}

fn forward(cache: &mut Cache, scope: &Scope<'_>) {
    cache.scope = Some(*scope);
}

fn main() {}
