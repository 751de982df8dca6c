//! cuRAND: generators, whose numbers are a function of the seed and of how many came before. They are not those of the
//! real library.

#![allow(non_snake_case)]

use std::ffi::c_int;
use std::sync::Arc;

use crate::abi::{Null, Out, Raw, Status};
use crate::driver::{current_context, find_stream};
use crate::queue::Work;
use crate::race::Access;
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, State, Tag, lock};

/// `curandStatus_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandStatus(c_int);

impl RandStatus {
    const SUCCESS: RandStatus = RandStatus(0);
    const NOT_INITIALIZED: RandStatus = RandStatus(101);
    const OUT_OF_RANGE: RandStatus = RandStatus(104);
    const LENGTH_NOT_MULTIPLE: RandStatus = RandStatus(105);
    const LAUNCH_FAILURE: RandStatus = RandStatus(201);
}

impl From<Status> for RandStatus {
    fn from(_: Status) -> Self {
        RandStatus::LAUNCH_FAILURE
    }
}

impl From<Null> for RandStatus {
    fn from(_: Null) -> Self {
        RandStatus::OUT_OF_RANGE
    }
}

type Answer<T = ()> = Result<T, RandStatus>;

pub struct Generator {
    pub context: usize,
    stream: Raw,
    seed: u64,
    /// Numbers drawn so far.
    drawn: u64,
    pub destroyed: bool,
}

fn call(body: impl FnOnce(&mut Held) -> Answer) -> RandStatus {
    body(&mut lock()).err().unwrap_or(RandStatus::SUCCESS)
}

fn find(held: &mut State, raw: Raw) -> Answer<usize> {
    let is_alive = |index: &usize| held.generators.get(*index).is_some_and(|generator| !generator.destroyed);
    Tag::Generator.index(raw).filter(is_alive).ok_or_else(|| {
        held.reports.add(Kind::Misuse, format!("{raw:#x} is used as a cuRAND generator, and is none"));
        RandStatus::NOT_INITIALIZED
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandCreateGenerator(generator: Out<Raw>, _kind: c_int) -> RandStatus {
    call(|held| {
        let context = current_context(held).map_err(|_| RandStatus::NOT_INITIALIZED)?;
        held.generators.push(Generator { context, stream: 0, seed: 0, drawn: 0, destroyed: false });
        Ok(generator.set(Tag::Generator.handle(held.generators.len() - 1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandDestroyGenerator(generator: Raw) -> RandStatus {
    call(|held| {
        let index = find(held, generator)?;
        held.generators[index].destroyed = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandSetPseudoRandomGeneratorSeed(generator: Raw, seed: u64) -> RandStatus {
    call(|held| {
        let index = find(held, generator)?;
        (held.generators[index].seed, held.generators[index].drawn) = (seed, 0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandSetGeneratorOffset(generator: Raw, offset: u64) -> RandStatus {
    call(|held| {
        let index = find(held, generator)?;
        held.generators[index].drawn = offset;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandSetStream(generator: Raw, stream: Raw) -> RandStatus {
    call(|held| {
        let index = find(held, generator)?;
        find_stream(held, stream)?;
        held.generators[index].stream = stream;
        Ok(())
    })
}

/// Numbers by their place in a generator's sequence.
#[derive(Clone, Copy)]
struct Sequence {
    seed: u64,
    first: u64,
}

impl Sequence {
    /// Any bits (SplitMix64).
    fn bits(self, index: u64) -> u64 {
        let place = self.first.wrapping_add(index).wrapping_add(1);
        let mut z = self.seed.wrapping_add(place.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Above 0, at most 1, a multiple of 2^-24, which f32 holds too.
    fn uniform(self, index: u64) -> f64 {
        ((self.bits(index) >> 40) + 1) as f64 / (1u64 << 24) as f64
    }

    /// Of mean 0 and deviation 1, two from two (Box-Muller).
    fn normal(self, index: u64) -> f64 {
        let (pair, odd) = (index & !1, index & 1 == 1);
        let radius = (-2.0 * self.uniform(pair).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.uniform(pair + 1);
        radius * if odd { angle.sin() } else { angle.cos() }
    }
}

fn generate<T: Copy + 'static>(
    name: &str,
    generator: Raw,
    to: u64,
    count: usize,
    value: impl Fn(Sequence, u64) -> T + Send + Sync + 'static,
) -> RandStatus {
    call(|held| {
        let index = find(held, generator)?;
        let stream = held.generators[index].stream;
        let stream = find_stream(held, stream)?;
        if count == 0 {
            return Ok(());
        }
        let sequence = Sequence { seed: held.generators[index].seed, first: held.generators[index].drawn };
        held.generators[index].drawn += count as u64;
        let run = Arc::new(move || {
            for i in 0..count {
                // SAFETY: the scheduler runs this only while the named range, `count` values long, is mapped.
                unsafe { (to as *mut T).add(i).write_unaligned(value(sequence, i as u64)) };
            }
        });
        let accesses = [Access::write(to as usize, count * size_of::<T>())];
        held.submit(stream, name, &accesses, Work::Memory(run))?;
        scheduler::after_submission(held);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn curandGenerate(generator: Raw, to: u64, count: usize) -> RandStatus {
    generate("curandGenerate", generator, to, count, |sequence, i| (sequence.bits(i) >> 32) as u32)
}

#[unsafe(no_mangle)]
pub extern "C" fn curandGenerateUniform(generator: Raw, to: u64, count: usize) -> RandStatus {
    generate("curandGenerateUniform", generator, to, count, |sequence, i| sequence.uniform(i) as f32)
}

#[unsafe(no_mangle)]
pub extern "C" fn curandGenerateUniformDouble(generator: Raw, to: u64, count: usize) -> RandStatus {
    generate("curandGenerateUniformDouble", generator, to, count, Sequence::uniform)
}

#[unsafe(no_mangle)]
pub extern "C" fn curandGenerateNormal(
    generator: Raw,
    to: u64,
    count: usize,
    mean: f32,
    deviation: f32,
) -> RandStatus {
    if count % 2 == 1 {
        return RandStatus::LENGTH_NOT_MULTIPLE;
    }
    let value = move |sequence: Sequence, i| mean + deviation * sequence.normal(i) as f32;
    generate("curandGenerateNormal", generator, to, count, value)
}

#[unsafe(no_mangle)]
pub extern "C" fn curandGenerateNormalDouble(
    generator: Raw,
    to: u64,
    count: usize,
    mean: f64,
    deviation: f64,
) -> RandStatus {
    if count % 2 == 1 {
        return RandStatus::LENGTH_NOT_MULTIPLE;
    }
    let value = move |sequence: Sequence, i| mean + deviation * sequence.normal(i);
    generate("curandGenerateNormalDouble", generator, to, count, value)
}
