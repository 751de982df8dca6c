use fsdp_kernels::{
    Dtype, EmbeddingArgs, EmbeddingBackwardArgs, EmbeddingSpansArgs, embedding, embedding_backward,
    embedding_spans,
};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::values;

/// The loop of fsdp-models/src/ops/embedding.rs, past ids that the table does not have.
fn expected(ids: &[u32], drows: &[f32], dweight: &mut [f32], dim: usize) {
    for (position, &id) in ids.iter().enumerate() {
        if let Some(row) = dweight.chunks_exact_mut(dim).nth(id as usize) {
            row.iter_mut().zip(&drows[position * dim..]).for_each(|(d, g)| *d += g);
        }
    }
}

fn run(
    device: Device,
    dtype: Dtype,
    ids: &[u32],
    drows: &[f32],
    dweight: &[f32],
    dim: usize,
    offset: usize,
) -> Vec<f32> {
    let vocab = dweight.len() / dim;
    let (ids, drows) = (Buffer::of(ids, 0), Buffer::real(dtype, drows, offset));
    let count = ids.read::<u32>().len() as u32;
    let dweight = Buffer::of(dweight, offset);
    let [first, end] = [(); 2].map(|()| Buffer::of(&vec![0u32; vocab], 0));
    let args =
        EmbeddingSpansArgs { ids: ids.at(), first: first.at(), end: end.at(), count, vocab: vocab as u32 };
    device.launch(embedding_spans(), &args);
    let args = EmbeddingBackwardArgs {
        ids: ids.at(),
        first: first.at(),
        end: end.at(),
        drows: drows.at(),
        dweight: dweight.at(),
        dim: dim as u64,
        count,
        vocab: vocab as u32,
    };
    device.launch(embedding_backward(dtype), &args);
    dweight.read()
}

/// Ids that come once, often, side by side and hundreds of positions apart.
fn ids(count: usize, vocab: u32) -> Vec<u32> {
    (0..count as u32)
        .map(|at| match at % 5 {
            0 => 1 % vocab,
            1 => at / 7 % vocab,
            2 => (at * 7919) % vocab,
            3 => vocab - 1,
            _ => at / 300 % vocab,
        })
        .collect()
}

#[test]
fn gives_the_bits_of_the_cpu_op() {
    for dtype in Dtype::ALL {
        for (count, dim, vocab) in [
            (0, 4, 3),
            (1, 1, 1),
            (3, 3, 2),
            (31, 4, 9),
            (33, 5, 40),
            (255, 8, 50),
            (256, 12, 3),
            (257, 1023, 90),
            (40, 1024, 20),
            (20, 1025, 7),
            (9, 2060, 3),
            (1500, 6, 11),
        ] {
            let ids = ids(count, vocab as u32);
            let (drows, start) = (values(dtype, count * dim, 1), values(Dtype::F32, vocab * dim, 2));
            let mut want = start.clone();
            expected(&ids, &drows, &mut want, dim);
            for offset in [0, 1] {
                let got = run(Device::WIDE, dtype, &ids, &drows, &start, dim, offset);
                assert!(got == want, "{dtype:?} {count} {dim} {vocab} {offset}");
            }
        }
    }
}

#[test]
fn does_not_depend_on_the_grid() {
    let ids = ids(600, 13);
    let (drows, start) = (values(Dtype::BF16, 600 * 9, 1), values(Dtype::F32, 13 * 9, 2));
    on_every_grid(|device| run(device, Dtype::BF16, &ids, &drows, &start, 9, 0));
}

#[test]
fn ids_that_the_table_does_not_have_are_passed_over() {
    let ids = [2, 5, 0, u32::MAX, 2, 4];
    let (drows, start) = (values(Dtype::F32, 6 * 4, 1), values(Dtype::F32, 5 * 4, 2));
    let mut want = start.clone();
    expected(&ids, &drows, &mut want, 4);
    assert_eq!(run(Device::WIDE, Dtype::F32, &ids, &drows, &start, 4, 0), want);
}

#[test]
fn rows_are_those_of_the_ids() {
    for dtype in Dtype::ALL {
        for dim in [1, 3, 4, 255, 1028, 2050] {
            for offset in [0, 1] {
                let table = values(dtype, 7 * dim, 1);
                let wanted = [6u32, 0, 3, 3, 7, u32::MAX, 1];
                let rows = on_every_grid(|device| {
                    let (ids, weight) = (Buffer::of(&wanted, 0), Buffer::real(dtype, &table, offset));
                    let rows = Buffer::real(dtype, &vec![7.0; wanted.len() * dim], 0);
                    let args = EmbeddingArgs {
                        ids: ids.at(),
                        weight: weight.at(),
                        rows: rows.at(),
                        dim: dim as u64,
                        count: wanted.len() as u64,
                        vocab: 7,
                    };
                    device.launch(embedding(dtype), &args);
                    rows.bits(dtype)
                });
                for (row, id) in rows.chunks_exact(dim).zip(wanted) {
                    match table.chunks_exact(dim).nth(id as usize) {
                        Some(want) => assert!(row.iter().zip(want).all(|(row, want)| *row == want.to_bits())),
                        None => assert!(row.iter().all(|&bits| f32::from_bits(bits).is_nan())),
                    }
                }
            }
        }
    }
}
