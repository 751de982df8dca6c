//! Warnings of the library.

use std::fmt::Display;

use log::LevelFilter;

/// Warns whoever runs the program, of what is likely to be a mistake.
///
/// A program with a logger of the `log` crate gets the warning there, with the target `fsdp`. A program without one gets it on
/// standard error: none of these warnings should be lost because nobody has thought of a logger.
pub fn warn(message: impl Display) {
    // Nothing is logged until a program has set a logger and its level.
    if log::max_level() == LevelFilter::Off {
        eprintln!("fsdp: warning: {message}");
    } else {
        log::warn!(target: "fsdp", "{message}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use log::{Level, Log, Metadata, Record};

    use super::*;

    static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct Memory;

    impl Log for Memory {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &Record<'_>) {
            assert_eq!((record.level(), record.target()), (Level::Warn, "fsdp"));
            LOGGED.lock().unwrap().push(record.args().to_string());
        }

        fn flush(&self) {}
    }

    #[test]
    fn a_warning_goes_to_the_logger_if_there_is_one() {
        // On standard error.
        warn("before");
        log::set_logger(&Memory).unwrap();
        log::set_max_level(LevelFilter::Warn);
        warn("after");
        assert_eq!(*LOGGED.lock().unwrap(), ["after"]);
    }
}
