//! Ranks that are joined by TCP: threads, each as a process would be.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use fsdp_comm::comm::tcp::Place;
use fsdp_comm::comm::{Phase, Tag};
use fsdp_comm::launch::{LaunchError, Launcher, World};
use sha2::{Digest, Sha256};

/// What ranks return.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const SOON: Duration = Duration::from_secs(1);
pub const LATE: Duration = Duration::from_secs(60);

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("there is a free port");
    listener.local_addr().expect("it has an address").port()
}

pub fn place(rank: usize, size: usize, port: u16) -> Place {
    Place { rank, size, local_rank: rank, address: ("127.0.0.1".to_owned(), port) }
}

/// Runs `body` on `size` ranks; what became of each.
pub fn launch<T: Send>(
    size: usize,
    timeout: Duration,
    body: impl Fn(&World) -> Outcome<T> + Sync,
) -> Vec<Result<T, LaunchError>> {
    let (port, body) = (free_port(), &body);
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            scope.spawn(move || {
                let launcher = Launcher::new().timeout(timeout).stack_size(1 << 20);
                launcher.join(&place(rank, size, port), |world| body(&world))
            })
        };
        let ranks = (0..size).map(rank).collect::<Vec<_>>();
        ranks.into_iter().map(|rank| rank.join().expect("a launch does not panic")).collect()
    })
}

/// Runs `body` on ranks that must end well.
pub fn run<T: Send>(size: usize, body: impl Fn(&World) -> Outcome<T> + Sync) -> Vec<T> {
    let ends = launch(size, LATE, body).into_iter().collect::<Result<_, _>>();
    ends.unwrap_or_else(|error| panic!("{error}"))
}

/// Says hello as a rank does, byte by byte, with a secret's text; whether rank 0 shows that it knows the same.
pub fn hello(stream: &mut TcpStream, secret: &str, rank: u32, size: u32) -> bool {
    let hmac = |parts: &[&[u8]]| -> [u8; 32] {
        let mut block = [0; 64];
        block[..32].copy_from_slice(&Sha256::digest(secret));
        let inner = Sha256::digest([&block.map(|byte| byte ^ 0x36)[..], &parts.concat()].concat());
        Sha256::digest([&block.map(|byte| byte ^ 0x5c)[..], &inner].concat()).into()
    };
    let own = [7; 16];
    stream.write_all(&[&b"FSDP\x04\0\0\0"[..], &own].concat()).expect("it is taken");
    let mut answer = [0; 56];
    stream.read_exact(&mut answer).expect("it is answered");
    let other = &answer[8..24];
    let (rank, size) = (rank.to_le_bytes(), size.to_le_bytes());
    let proof = hmac(&[b"rank..", &own, other, &rank, &size]);
    stream.write_all(&[&rank[..], &size, &proof].concat()).expect("it is taken");
    answer[24..] == hmac(&[b"server", other, &own, &[0; 4], &[0; 4]])
}

pub fn tag(unit: &str) -> Tag {
    Tag { unit: unit.into(), phase: Phase::Setup, step: 0 }
}
