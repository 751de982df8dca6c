//! Shows names and texts from files in messages: shortened, and with control characters escaped.

use std::fmt;
use std::path::Path;

/// Longest name that a message shows whole, in characters.
const NAME: usize = 120;

/// Most names that a message lists; the rest is counted.
const LISTED: usize = 8;

/// Most characters of a list in a message, if it has more than one name.
const LIST: usize = 400;

/// Longest words of another library, or path, that a message shows whole, in characters.
const WORDS: usize = 600;

/// Of longer ones, what is shown of the end: a parser says the place there.
const END: usize = 120;

/// A name or a text from a file, as a message shows it: the first characters if it is long, control characters escaped.
///
/// ```
/// use fsdp_layout::brief::brief;
///
/// assert_eq!(brief("a\u{1b}[2J"), "a\\u{1b}[2J");
/// assert!(brief(&"x".repeat(1000)).ends_with("xx.. (1000 characters)"));
/// ```
pub fn brief(text: &str) -> String {
    brief_to(text, NAME)
}

/// Shows a text in a message as [`brief`] does, with at most `most` characters.
pub fn brief_to(text: &str, most: usize) -> String {
    match start(text, most) {
        (shown, true) => shown,
        (shown, false) => format!("{shown}.. ({} characters)", text.chars().count()),
    }
}

/// Names from a file, as a message lists them: some of the first, and how many more there are; `none` if there are none.
///
/// ```
/// use fsdp_layout::brief::listed;
///
/// let names: Vec<String> = (0..1_000_000).map(|name| name.to_string()).collect();
/// assert_eq!(listed(&names), "0, 1, 2, 3, 4, 5, 6, 7 and 999992 more");
/// ```
pub fn listed<S: AsRef<str>>(names: &[S]) -> String {
    listed_as(names, |name| brief(name.as_ref()))
}

/// Lists items as [`listed`] does, with `words` for each.
pub fn listed_as<T>(items: &[T], words: impl Fn(&T) -> String) -> String {
    let (mut text, mut length, mut shown) = (String::new(), 0, 0);
    for item in items.iter().take(LISTED) {
        let item = words(item);
        length += item.chars().count();
        if shown > 0 {
            if length > LIST {
                break;
            }
            text += ", ";
        }
        text += &item;
        shown += 1;
    }
    match items.len() - shown {
        0 if shown == 0 => "none".to_owned(),
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// What another library says of a file, with what it repeats of the file cut out of the middle, control characters escaped.
pub fn said(words: impl fmt::Display) -> String {
    let words = words.to_string();
    if let (shown, true) = start(&words, WORDS) {
        return shown;
    }
    let from = words.char_indices().rev().nth(END - 1).map_or(0, |(at, _)| at);
    let (start, end) = (start(&words, WORDS - END).0, start(&words[from..], END).0);
    format!("{start} .. {end}")
}

/// A path in a message. One that a file has given may be very long.
pub fn shown(path: &Path) -> String {
    said(path.display())
}

/// The first `most` characters after control characters are escaped, and whether these are all.
fn start(text: &str, most: usize) -> (String, bool) {
    let (mut shown, mut length) = (String::new(), 0);
    for c in text.chars() {
        let before = shown.len();
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        // An escaped character is shown whole or not at all; each of its characters is a byte.
        length += if c.is_control() { shown.len() - before } else { 1 };
        if length > most {
            shown.truncate(before);
            return (shown, false);
        }
    }
    (shown, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_and_counted() {
        assert_eq!(brief("model.norm.weight"), "model.norm.weight");
        assert_eq!(brief(&"é".repeat(120)), "é".repeat(120));
        assert_eq!(brief(&"é".repeat(121)), format!("{}.. (121 characters)", "é".repeat(120)));
        // Eight characters each when escaped.
        assert_eq!(brief_to(&"\u{7f}".repeat(3), 13), "\\u{7f}\\u{7f}.. (3 characters)");
    }

    #[test]
    fn a_list_shows_the_first_names_and_counts_the_rest() {
        assert_eq!(listed::<&str>(&[]), "none");
        assert_eq!(listed(&["a", "b"]), "a, b");
        let long = vec!["x".repeat(100); 7];
        assert_eq!(listed(&long), format!("{} and 3 more", long[..4].join(", ")));
        let longest = listed(&vec!["x".repeat(10_000); 100]);
        assert!(longest.chars().count() < 600 && longest.ends_with(" and 98 more"), "{longest}");
    }

    #[test]
    fn the_end_of_long_words_stays() {
        assert_eq!(said("expected `,` at line 1 column 7"), "expected `,` at line 1 column 7");
        let long = said(format!("invalid type: string {:?} at line 1 column 9", "\u{1b}".repeat(1_000_000)));
        assert!(long.starts_with("invalid type: string ") && long.ends_with(" at line 1 column 9"), "{long}");
        assert!(long.chars().count() <= WORDS + 4, "{long}");
    }
}
