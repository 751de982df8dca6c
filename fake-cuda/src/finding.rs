//! What the driver and NCCL found wrong.

use std::fmt;

/// The kind of mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Two operations touch the same bytes, one of them writes, and no wait orders them.
    Race,
    /// Memory is touched after it was freed, or not before.
    UseAfterFree,
    /// Memory is freed without waiting for what uses it.
    FreeInFlight,
    /// Memory is freed twice.
    DoubleFree,
    /// Memory, a stream, an event or a communicator is still there at the end.
    Leak,
    /// An address where no memory is, or bytes past the end of it.
    InvalidAccess,
    /// Something wrote behind the end of memory.
    Overrun,
    /// A call that the real library refuses or leaves undefined.
    Misuse,
    /// Ranks call different collectives, or the same with different arguments.
    Mismatch,
    /// Streams that wait for each other, or a wait for what does not come.
    Deadlock,
    /// A function or kernel that is not there.
    Unsupported,
}

impl Kind {
    const NAMES: [(&'static str, Kind); 11] = [
        ("race", Kind::Race),
        ("use-after-free", Kind::UseAfterFree),
        ("free-in-flight", Kind::FreeInFlight),
        ("double-free", Kind::DoubleFree),
        ("leak", Kind::Leak),
        ("invalid-access", Kind::InvalidAccess),
        ("overrun", Kind::Overrun),
        ("misuse", Kind::Misuse),
        ("mismatch", Kind::Mismatch),
        ("deadlock", Kind::Deadlock),
        ("unsupported", Kind::Unsupported),
    ];
}

/// One thing found wrong, in words: the calls, their streams, the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of mistake.
    pub kind: Kind,
    /// What happened.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl Finding {
    /// Reads the driver's report: a line each, the kind's name, a tab, the message.
    pub(crate) fn parse(report: &str) -> Vec<Self> {
        let finding = |line: &str| {
            let (name, message) = line.split_once('\t')?;
            let (_, kind) = Kind::NAMES.into_iter().find(|(known, _)| *known == name)?;
            Some(Finding { kind, message: message.to_owned() })
        };
        report
            .lines()
            .map(|line| finding(line).unwrap_or_else(|| panic!("not a finding: {line:?}")))
            .collect()
    }
}
