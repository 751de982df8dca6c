use std::sync::mpsc::Sender;

use fsdp::Scope;

fn forward(scope: &Scope<'_>, sender: &Sender<&'static Scope<'static>>) {
    let _ = sender.send(scope);
}

fn main() {}
