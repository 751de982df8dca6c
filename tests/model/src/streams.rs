//! Streams and events.

use std::sync::{Arc, Mutex};

use crate::check::check;
use crate::comm::CommError;
use crate::device::cpu::{ComputeStream, CpuStream, WorkerScope};
use crate::device::{Event, Stream, Work};
use crate::rendezvous::{buffer, read, write};

/// Two streams take turns on one buffer, ordered by events only; the last handles go at any moment.
pub fn events_order_streams(schedules: usize) {
    check(schedules, || {
        let data = buffer(2);
        let (first, second) = (CpuStream::spawn("first"), CpuStream::spawn("second"));
        let host = ComputeStream::new("host");
        let add = |factor: f32, add: f32| -> Work {
            let data = data.clone();
            Box::new(move || {
                let value = read(&data)[0];
                write(&data, value * factor + add);
                Ok(())
            })
        };
        write(&data, 1.0);
        for _ in 0..2 {
            first.submit(add(2.0, 0.0)).unwrap();
            second.wait(&first.record()).unwrap();
            second.submit(add(1.0, 3.0)).unwrap();
            first.wait(&second.record()).unwrap();
        }
        host.wait(&first.record()).unwrap();
        assert_eq!(read(&data), [13.0; 2]);
        second.submit(add(1.0, 1.0)).unwrap();
        // What is queued runs before the worker is joined.
        drop((first, second));
        assert_eq!(read(&data), [14.0; 2]);
    });
}

/// A failure passes along events, whenever they are recorded and looked at, and what has not run is dropped.
pub fn a_failure_passes_along_events(schedules: usize) {
    check(schedules, || {
        let ran = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| -> Work {
            let ran = ran.clone();
            Box::new(move || {
                ran.lock().unwrap().push(what);
                Ok(())
            })
        };
        let (first, second) = (CpuStream::spawn("first"), CpuStream::spawn("second"));
        let failure = CommError::Invalid { rank: 0, message: "planned".to_owned() };
        let error = failure.clone();
        let before = first.record();
        first.submit(note("before")).unwrap();
        first.submit(Box::new(move || Err(error))).unwrap();
        first.submit(note("after")).unwrap();
        second.submit(note("second")).unwrap();
        second.wait(&first.record()).unwrap();
        second.submit(note("after second")).unwrap();
        let (ends, scope) = ([second.record(), first.record()], WorkerScope::enter());
        drop((first, second));
        for end in &ends {
            assert_eq!(end.synchronize(), Err(failure.clone()));
        }
        scope.join();
        assert_eq!(before.synchronize(), Ok(()));
        let mut ran = ran.lock().unwrap().clone();
        ran.sort_unstable();
        assert_eq!(ran, ["before", "second"]);
    });
}
