//! What was found wrong, for tests to read.

/// What kind of mistake a finding is. The names are part of the interface to tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Race,
    UseAfterFree,
    FreeInFlight,
    DoubleFree,
    Leak,
    InvalidAccess,
    Overrun,
    Misuse,
    Mismatch,
    Deadlock,
    Unsupported,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Race => "race",
            Kind::UseAfterFree => "use-after-free",
            Kind::FreeInFlight => "free-in-flight",
            Kind::DoubleFree => "double-free",
            Kind::Leak => "leak",
            Kind::InvalidAccess => "invalid-access",
            Kind::Overrun => "overrun",
            Kind::Misuse => "misuse",
            Kind::Mismatch => "mismatch",
            Kind::Deadlock => "deadlock",
            Kind::Unsupported => "unsupported",
        }
    }
}

/// All findings, in the order in which they came, each once.
#[derive(Default)]
pub struct Reports(Vec<(Kind, String)>);

impl Reports {
    pub fn add(&mut self, kind: Kind, message: String) {
        if !self.0.iter().any(|(k, m)| *k == kind && *m == message) {
            self.0.push((kind, message));
        }
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A line each: the kind's name, a tab, the message.
    pub fn text(&self) -> String {
        self.0
            .iter()
            .map(|(kind, message)| format!("{}\t{}\n", kind.name(), message.replace('\n', " ")))
            .collect()
    }
}
