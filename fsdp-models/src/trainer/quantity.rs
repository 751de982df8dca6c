//! Formats and parses numbers for a person.

use bytesize::ByteSize;
use indicatif::{BinaryBytes, HumanCount};

/// A byte count in binary units: `512 B`, `1.50 MiB`, `80.00 GiB`.
pub fn bytes(count: u64) -> String {
    BinaryBytes(count).to_string()
}

/// A number of bytes in a person's words, as `5GB`, `1.5 GiB` or `4096`: decimal units and binary ones.
///
/// # Errors
/// If it is something else; the message says what is expected.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>().map(|size| size.as_u64()) {
        Ok(0) => Err(format!("`{text}` is no byte at all: expected at least 1")),
        // What is more than can be counted is the most that can.
        Ok(bytes) if bytes < u64::MAX => Ok(bytes),
        _ => Err(format!("`{text}` is no number of bytes: expected one as 5GB, 500 MiB or 4096")),
    }
}

/// An integer with its digits in groups of three: `1,234,567`.
pub fn count(value: u64) -> String {
    HumanCount(value).to_string()
}

/// A rate rounded to an integer and grouped; `-` where there is none.
pub fn rate(value: f64) -> String {
    if value.is_finite() && value >= 0.0 { count(value.round() as u64) } else { "-".to_owned() }
}

/// A length of time: `8 s`, `1 min 30 s`, `2 h 05 min`; `-` where there is none. By hand: indicatif has one unit (`2 minutes`) or a
/// clock (`00:01:30`).
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "-".to_owned();
    }
    let seconds = seconds.round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_binary_units() {
        for (value, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (10 * 1024, "10.00 KiB"),
            (100 << 20, "100.00 MiB"),
            (80 << 30, "80.00 GiB"),
            (u64::MAX, "16.00 EiB"),
        ] {
            assert_eq!(bytes(value), text);
        }
    }

    #[test]
    fn bytes_are_read_with_their_unit() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("1.5 KiB", 1536),
            ("4096", 4096),
            ("200mb", 200_000_000),
            ("7 B", 7),
            ("2 TiB", 2 << 40),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GB", "0", "-1 GB", "5 gigabytes", "1.2.3 MB", "inf", "99999999999 TB", "1e3"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn digits_are_grouped() {
        let values = [0, 999, 1000, 12_345, 1_234_567].map(count);
        assert_eq!(values, ["0", "999", "1,000", "12,345", "1,234,567"]);
        assert_eq!([rate(4512.4), rate(f64::NAN), rate(f64::INFINITY)], ["4,512", "-", "-"]);
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let values = [0.4, 59.4, 59.6, 90.0, 3599.6, 7500.0, f64::INFINITY].map(duration);
        assert_eq!(values, ["0 s", "59 s", "1 min 00 s", "1 min 30 s", "1 h 00 min", "2 h 05 min", "-"]);
    }
}
