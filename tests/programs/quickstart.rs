//! The smaller examples as a user runs them, and what the README says a crate of one's own depends on.

use std::process::Command;

#[test]
fn it_trains_unless_it_is_asked_what_it_does() {
    let program = crate::example::built("quickstart");
    let run = |options: &[&str]| {
        let output = Command::new(&program).args(options).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let help = run(&["--help"]);
    assert!(help.contains("Usage: quickstart") && !help.contains("loss"), "{help}");
    let said = run(&[]);
    let losses: Vec<f64> =
        said.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(losses.len() == 6 && losses[5] < losses[0] / 4.0, "{said}");
}

#[test]
fn the_pretrained_example_says_once_what_is_wrong() {
    let mut program = Command::new(crate::example::built("pretrained"));
    let output = program.args(["no/such/model", "--text", "no/such/text"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.starts_with("error: cannot "), "{error}");
    assert_eq!(error.matches("No such file").count(), 1, "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn the_readme_names_the_version_of_candle_that_this_is_built_with() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let (readme, manifest) = (read("README.md"), read("Cargo.toml"));
    let after = |text: &str, start: &str| {
        let version = text.split_once(start).expect(start).1.split_once('"').unwrap().0;
        version.to_owned()
    };
    let ours = after(&manifest, "\ncandle-core = { version = \"");
    assert_eq!(after(&readme, "\ncandle-core = \""), ours);
}

#[test]
fn the_readme_lists_every_crate_that_its_code_uses() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let blocks = |kind: &str| -> Vec<String> {
        let fence = format!("```{kind}\n");
        readme.split(&fence).skip(1).map(|rest| rest.split_once("\n```").unwrap().0.to_owned()).collect()
    };
    let manifest = blocks("toml").concat();
    let code = blocks("rust").join("\n");
    let used = code.lines().filter_map(|line| line.strip_prefix("use ")?.split("::").next());
    let used: std::collections::BTreeSet<&str> = used.filter(|name| *name != "std").collect();
    assert!(used.contains("fsdp"), "{used:?}");
    for name in used {
        let entry = format!("\n{} = ", name.replace('_', "-"));
        assert!(manifest.contains(&entry), "{name} is used, and is not in\n{manifest}");
    }
}
