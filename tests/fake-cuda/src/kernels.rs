//! Kernels of `fsdp-kernels`: those that the runtime launches by itself as Rust functions, and the rest, which models
//! launch, as its own emulation runs them.

use fsdp_kernels::{AccumulateArgs, Args, CastArgs, Dtype, Kernel, SumRanksArgs, host};
use half::{bf16, f16};

use fake_cuda::{Access, Launch, Session, register_kernel};

/// Registers them, and returns text that is taken for a module that has all kernels. Those that are emulated are not there
/// where no C++ compiler was found.
pub fn register_fsdp_kernels() -> String {
    for kernel in Kernel::all() {
        let [from, to] = kernel.dtypes();
        let name = kernel.name();
        if name.starts_with("fsdp_cast_") {
            add::<CastArgs>(kernel, move |launch, args| {
                let values = read(launch, args.from, args.len, from);
                write(launch, args.to, to, &values);
            });
        } else if name.starts_with("fsdp_accumulate_") {
            add::<AccumulateArgs>(kernel, move |launch, args| {
                let mut acc = vec![0.0; args.len as usize];
                if args.beta != 0.0 {
                    let old = read(launch, args.acc, args.len, to);
                    acc.iter_mut().zip(old).for_each(|(acc, old)| *acc = old * args.beta);
                }
                if args.scale != 0.0 {
                    let values = read(launch, args.values, args.len, from);
                    acc.iter_mut().zip(values).for_each(|(acc, value)| *acc += args.scale * value);
                }
                write(launch, args.acc, to, &acc);
            });
        } else if name.starts_with("fsdp_sum_ranks_") {
            add::<SumRanksArgs>(kernel, move |launch, args| {
                let sources = &args.sources[..args.count as usize];
                let mut sum = read(launch, sources[0], args.len, from);
                for &source in &sources[1..] {
                    let values = read(launch, source, args.len, from);
                    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
                sum.iter_mut().for_each(|sum| *sum *= args.scale);
                if args.add != 0 {
                    let old = read(launch, args.out, args.len, to);
                    sum.iter_mut().zip(old).for_each(|(sum, old)| *sum += old);
                }
                write(launch, args.out, to, &sum);
            });
        } else if host::available() {
            emulate(kernel);
        }
    }
    Session::image(Kernel::all().map(|kernel| kernel.name()))
}

fn add<A: Args>(kernel: Kernel, run: impl Fn(&Launch<'_>, A) + Send + Sync + 'static) {
    register_kernel(kernel.name(), &[kernel.args_size()], accesses(kernel), move |launch| {
        assert_eq!(kernel.args_size(), size_of::<A>(), "the kernel takes another struct");
        // SAFETY: the arguments are the struct that the kernel takes, as many bytes as were registered.
        run(launch, unsafe { launch.param_pointer(0).cast::<A>().read_unaligned() })
    });
}

/// A panic says what the emulation finds.
fn emulate(kernel: Kernel) {
    register_kernel(kernel.name(), &[kernel.args_size()], accesses(kernel), move |launch| {
        let args = launch.param_pointer(0);
        // SAFETY: the arguments are the struct that the kernel takes.
        let memory = unsafe { kernel.accesses(args) };
        let [x, y, _] = launch.grid();
        let shape = fsdp_kernels::Launch {
            grid: [x, y],
            threads: launch.block()[0],
            shared_bytes: launch.shared_bytes(),
        };
        // SAFETY: the driver runs a kernel only while all that it has said it uses is memory, and under its lock.
        let outcome = unsafe { host::launch_raw(kernel.name(), shape, args, &memory, 0) };
        outcome.unwrap_or_else(|error| panic!("{}: {error}", kernel.name()));
    });
}

fn accesses(kernel: Kernel) -> impl Fn(&Launch<'_>) -> Vec<Access> + Send + Sync + 'static {
    move |launch| {
        // SAFETY: the arguments are the struct that the kernel takes.
        let accesses = unsafe { kernel.accesses(launch.param_pointer(0)) };
        let both = |access: fsdp_kernels::Access| {
            let (begin, bytes) = (access.begin, access.bytes as usize);
            let written = access.writes.then(|| Access::write(begin, bytes));
            // What is written may be read as well.
            std::iter::once(Access::read(begin, bytes)).chain(written)
        };
        accesses.into_iter().flat_map(both).collect()
    }
}

fn read(launch: &Launch<'_>, at: u64, len: u64, dtype: Dtype) -> Vec<f32> {
    let len = len as usize;
    match dtype {
        Dtype::F32 => launch.read::<f32>(at, len),
        Dtype::BF16 => launch.read::<u16>(at, len).into_iter().map(|x| bf16::from_bits(x).to_f32()).collect(),
        Dtype::F16 => launch.read::<u16>(at, len).into_iter().map(|x| f16::from_bits(x).to_f32()).collect(),
    }
}

fn write(launch: &Launch<'_>, at: u64, dtype: Dtype, values: &[f32]) {
    let narrow = |convert: fn(f32) -> u16| values.iter().map(|&x| convert(x)).collect::<Vec<u16>>();
    match dtype {
        Dtype::F32 => launch.write(at, values),
        Dtype::BF16 => launch.write(at, &narrow(|x| bf16::from_f32(x).to_bits())),
        Dtype::F16 => launch.write(at, &narrow(|x| f16::from_f32(x).to_bits())),
    }
}
