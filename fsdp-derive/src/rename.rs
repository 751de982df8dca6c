//! `rename_all`: serde's rules for the case of names, applied to fields.

/// How the names of fields are written in checkpoints. Fields are declared in snake case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RenameRule {
    Lower,
    Upper,
    Pascal,
    Camel,
    Snake,
    ScreamingSnake,
    Kebab,
    ScreamingKebab,
}

impl RenameRule {
    /// The spelling of each rule: itself.
    pub const NAMES: &[&str] = &[
        "lowercase",
        "UPPERCASE",
        "PascalCase",
        "camelCase",
        "snake_case",
        "SCREAMING_SNAKE_CASE",
        "kebab-case",
        "SCREAMING-KEBAB-CASE",
    ];

    const ALL: [RenameRule; 8] = [
        RenameRule::Lower,
        RenameRule::Upper,
        RenameRule::Pascal,
        RenameRule::Camel,
        RenameRule::Snake,
        RenameRule::ScreamingSnake,
        RenameRule::Kebab,
        RenameRule::ScreamingKebab,
    ];

    /// The rule of this spelling.
    pub fn named(name: &str) -> Option<RenameRule> {
        let at = RenameRule::NAMES.iter().position(|known| *known == name)?;
        Some(RenameRule::ALL[at])
    }

    /// A field's name under the rule; as it is if nothing would be left of it.
    pub fn apply(self, field: &str) -> String {
        let name = match self {
            RenameRule::Lower | RenameRule::Snake => field.to_string(),
            RenameRule::Upper | RenameRule::ScreamingSnake => field.to_uppercase(),
            RenameRule::Pascal => field.split('_').map(capital).collect(),
            RenameRule::Camel => {
                let mut words = field.split('_').filter(|word| !word.is_empty());
                let first = words.next().unwrap_or_default().to_string();
                words.fold(first, |name, word| name + &capital(word))
            }
            RenameRule::Kebab => field.replace('_', "-"),
            RenameRule::ScreamingKebab => field.to_uppercase().replace('_', "-"),
        };
        if name.is_empty() { field.to_string() } else { name }
    }
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule() {
        let under = |rule: &str| RenameRule::named(rule).unwrap().apply("up_proj_2");
        let all: Vec<String> = RenameRule::NAMES.iter().map(|rule| under(rule)).collect();
        assert_eq!(
            all,
            [
                "up_proj_2",
                "UP_PROJ_2",
                "UpProj2",
                "upProj2",
                "up_proj_2",
                "UP_PROJ_2",
                "up-proj-2",
                "UP-PROJ-2"
            ]
        );
        assert_eq!(RenameRule::named("camelcase"), None);
        assert_eq!(RenameRule::Camel.apply("_hidden"), "hidden");
        assert_eq!(RenameRule::Pascal.apply("w"), "W");
        assert_eq!(RenameRule::Camel.apply("__"), "__");
    }
}
