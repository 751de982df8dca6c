//! The 16-bit weights that units compute with are those of the last step, gathered once where they are kept whole.

use fake_cuda::Session;
use fsdp_test_fake_cuda::schedules;

use crate::schedule::Sync;
use crate::setting::Setting;
use crate::spec::{Dtype, Strategy};
use crate::{Joined, Run, place, plain};

/// Two microbatches a step, the next units gathered ahead: each sees what the step before has made of the f32 weights.
#[test]
fn weights_are_those_of_the_last_step_in_every_microbatch() {
    for strategy in [Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams] {
        for joined in [Joined::OneDevice, Joined::Nccl] {
            for schedule in schedules(3) {
                let session = Session::new(schedule);
                place::register(&session);
                session.start_log();
                let microbatches = &[Sync::Nothing, Sync::Step];
                let setting =
                    Setting { strategy, weights: Dtype::BF16, prefetch: 2, microbatches, ..plain(2) };
                Run::new(setting, joined).train().unwrap();
                assert_eq!(place::take_wrong(), None);
                let gathers = session.operations().into_iter();
                let gathers = gathers.filter(|operation| operation.call.contains("ncclAllGather")).count();
                if joined == Joined::Nccl && strategy != Strategy::OptimGradsParams {
                    // By two ranks, in two steps, of the root and three units.
                    assert_eq!(gathers, 2 * 2 * 4, "{strategy}");
                }
            }
        }
    }
}
