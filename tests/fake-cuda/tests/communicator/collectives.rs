//! Each collective gives what plain sums and copies give, however late the device is.

use fake_cuda::{Schedule, Session};
use fsdp_runtime::comm::{Communicator, Gather};
use fsdp_runtime::device::Slice;
use fsdp_runtime::spec::Dtype;

use super::world::{run, tag, values};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

#[test]
fn all_gather() {
    for schedule in Schedule::all(3) {
        for ranks in RANKS {
            let _session = Session::new(schedule);
            let gathered = run(ranks, |rank| {
                let comm = rank.join()?;
                let mut parts = Vec::new();
                for (dtype, len) in DTYPES.into_iter().zip([5, 64, 0]) {
                    let send = rank.upload(dtype, &values(rank.rank(), len))?;
                    let recv = Slice::zeros_in(&rank.device.memory(), dtype, len * ranks, None)?;
                    parts.push(Gather { send, recv });
                }
                rank.hand_over()?;
                comm.all_gather(&*rank.side, tag("layers.0"), parts.clone())?;
                parts.iter().map(|part| rank.download(&part.recv)).collect::<Result<Vec<_>, _>>()
            });
            for parts in gathered {
                for (part, len) in parts.iter().zip([5, 64, 0]) {
                    let expected: Vec<f32> = (0..ranks).flat_map(|rank| values(rank, len)).collect();
                    assert_eq!(*part, expected);
                }
            }
        }
    }
}
