//! `fsdp launch` as a user runs it: a program's ranks as processes, their ends, and what is left of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

fn launcher() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| crate::example::built_program("fsdp"))
}

/// `fsdp launch` with these options, and then a program.
fn launch(options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(launcher());
    command.arg("launch").args(options).arg("--").args(program);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A small model's options, in a directory that has its text.
const SMALL: &str = "--text text --dim 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48 --seq 16 --batch 8";

fn place() -> TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("text"), include_bytes!("launch.rs")).unwrap();
    place
}

fn losses(path: &Path) -> Vec<(Value, Value)> {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps = lines.filter(|line| line.get("loss").is_some());
    steps.map(|step| (step["loss"].clone(), step["grad_norm"].clone())).collect()
}

#[test]
fn ranks_in_processes_train_as_ranks_in_threads_to_the_bit() {
    let train = crate::example::built("train_llama");
    let train = train.to_str().unwrap();
    let place = place();
    let run = |mut command: Command, more: &str| -> Output {
        let output = command.args(more.split(' ')).current_dir(&place).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        output
    };
    let program =
        |options: &str| [train].into_iter().chain(options.split(' ')).map(str::to_owned).collect::<Vec<_>>();
    for (ranks, options) in [
        ("2", "--steps 4"),
        ("3", "--steps 3 --batch 6 --strategy optim --param-dtype bf16"),
        ("4", "--steps 3 --outer-ranks 2 --microbatches 2 --save-weights weights"),
    ] {
        let options = program(&format!("{SMALL} {options}"));
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let mut threads = Command::new(options[0]);
        threads.args(&options[1..]).args(["--ranks", ranks]);
        run(threads, "--metrics threads");
        let weights = fs::read(place.path().join("weights")).ok();
        let logs = ["-n", ranks, "--logs", "logs"];
        let output = run(launch(&logs, &options), "--metrics processes");
        let (threads, processes) =
            (losses(&place.path().join("threads")), losses(&place.path().join("processes")));
        assert!(threads.len() >= 3 && threads == processes, "{threads:?} {processes:?}");
        assert_eq!(weights, fs::read(place.path().join("weights")).ok());
        // One rank prints, once; all is in the logs.
        let said = text(&output.stdout);
        assert_eq!(said.matches("tokens/s").count(), 1, "{said}");
        let log =
            |rank: usize| fs::read_to_string(place.path().join(format!("logs/rank-{rank}.log"))).unwrap();
        assert!(log(0).contains(said.lines().last().unwrap()), "{said}");
        assert_eq!(log(1), "");
        let mut left: Vec<_> =
            fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.retain(|name| name.to_string_lossy().starts_with('.'));
        assert!(left.is_empty(), "{left:?}");
    }
    let other = launch(&["-n", "2"], &[train, "--ranks", "3"]).output().unwrap();
    let error = text(&other.stderr);
    assert!(error.contains("error: --ranks is 3, but 2 ranks were started, each a process\n"), "{error}");
}

#[test]
fn each_rank_learns_its_place_and_the_secret() {
    let output = launch(
        &["-n", "3"],
        &["sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR ${#FSDP_TOKEN} $FSDP_PORT"],
    );
    let output = { output }.env("FSDP_PORT", "1").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, [0, 1, 2].map(|rank| format!("{rank} {rank} 3 127.0.0.1 64")));
}

#[test]
fn the_rank_that_fails_first_is_told_and_the_others_are_ended() {
    let place = tempfile::tempdir().unwrap();
    // The others heed no kind word.
    let program =
        "trap '' TERM; [ $RANK = 1 ] && { echo it is broken; exit 7; }; sleep 600 & wait; sleep 600";
    let output =
        launch(&["-n", "3", "--logs", "logs"], &["sh", "-c", program]).current_dir(&place).output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{error}");
    assert!(
        error.starts_with("fsdp launch: rank 1 (process ") && error.contains("has failed: exit status: 7"),
        "{error}"
    );
    assert!(error.contains("the end of `logs/rank-1.log`:\n  it is broken\n"), "{error}");

    let output = launch(&["-n", "2"], &["sh", "-c", "[ $RANK = 0 ] && kill -KILL $$"]).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9), "{}", text(&output.stderr));

    let output = launch(&["-n", "2"], &["no/such/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).starts_with("error: rank 0 cannot be started: `no/such/program`: "));
}

/// A launch whose ranks write their process numbers, and sleep.
fn sleepers(place: &TempDir, trap: &str) -> (Child, Vec<i32>) {
    let program = format!("{trap} echo $$ > pid-$RANK.tmp; mv pid-$RANK.tmp pid-$RANK; exec sleep 600");
    let launched = launch(&["-n", "3"], &["sh", "-c", &program])
        .current_dir(place)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = |rank: usize| loop {
        match fs::read_to_string(place.path().join(format!("pid-{rank}"))) {
            Ok(text) => return text.trim().parse().unwrap(),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    (launched, (0..3).map(pid).collect())
}

/// Whether a process is there, and not only its end.
fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

#[cfg(target_os = "linux")]
#[test]
fn signals_reach_every_rank_and_no_process_outlives_the_launch() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        let place = tempfile::tempdir().unwrap();
        let (mut launched, pids) = sleepers(&place, "");
        assert!(pids.iter().all(|pid| runs(*pid)));
        // SAFETY: a call with two numbers; the process is a child that was not waited for.
        assert_eq!(unsafe { libc::kill(launched.id().cast_signed(), signal) }, 0);
        let status = launched.wait().unwrap();
        if signal != libc::SIGKILL {
            assert_eq!(status.code(), Some(128 + signal));
        }
        // Those of a launcher that is killed go with it, a moment later.
        while pids.iter().any(|pid| runs(*pid)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_stops_all_ranks_after_one_step_whose_state_is_saved() {
    let train = crate::example::built("train_llama");
    let place = place();
    let checkpoints = "--checkpoints run --save-every 1000000 --metrics metrics";
    let options = |more: &str| format!("{SMALL} {checkpoints} {more}");
    let start = |more: &str| {
        let options = options(more);
        let program: Vec<&str> = [train.to_str().unwrap()].into_iter().chain(options.split(' ')).collect();
        launch(&["-n", "2"], &program)
            .current_dir(&place)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let run = start("--steps 1000000");
    let lines = || fs::read_to_string(place.path().join("metrics")).map_or(0, |text| text.lines().count());
    while lines() < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: a call with two numbers; the process is a child that was not waited for.
    assert_eq!(unsafe { libc::kill(run.id().cast_signed(), libc::SIGINT) }, 0);
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.ends_with(": its state is in `run`, from where --resume goes on\n"), "{said}");
    assert_eq!(said.matches("stopped after").count(), 1, "{said}");
    let output = start(&format!("--resume --steps {}", lines() + 2)).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}
