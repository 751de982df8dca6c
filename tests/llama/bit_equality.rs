//! For a number of ranks and one microbatch, what is sharded, recomputed or kept allocated changes no bit.

use fsdp_models::LlamaConfig;
use fsdp_models::data::{TextDataset, TextOptions};
use fsdp_models::trainer::TrainOptions;

use crate::harness::{Run, Way, all_to_the_end, bits, options, run};

/// Steps of each run: 50 with `FSDP_FULL_CURVES=1`; see `tests/README.md`.
fn steps() -> usize {
    if all_to_the_end() { 50 } else { 16 }
}

/// Steps of a small model, whose first norms are above the clipping bound and whose sizes fit no number of
/// ranks.
fn train(way: Way, double_buffer: bool) -> Run {
    let model = LlamaConfig {
        hidden_size: 36,
        intermediate_size: 50,
        num_hidden_layers: 3,
        num_attention_heads: 3,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        vocab_size: 131,
        initializer_range: 0.1,
        ..options(false).model
    };
    let mut options = way.of(TrainOptions::new(model, steps()));
    options.fsdp.double_buffer = double_buffer;
    let text = include_bytes!("bit_equality.rs").to_vec();
    let order = TextOptions { seq: 16, batch: 12, vocab: options.model.vocab_size, seed: 7 };
    run(way.ranks, &options, &TextDataset::from_bytes(text, order).unwrap(), None)
}

fn assert_bit_equal(ranks: usize) {
    let mut first: Option<Run> = None;
    for way in Way::all(ranks, 1) {
        for double_buffer in [true, false] {
            let this = train(way, double_buffer);
            // The first way is run twice: two runs give the same bits, too.
            let first = first.get_or_insert_with(|| train(way, double_buffer));
            let learnt = first.losses[0] - first.losses[steps() - 1];
            assert!(
                first.grad_norms[0] > 1.0 && learnt > if all_to_the_end() { 0.5 } else { 0.0 },
                "{learnt}"
            );
            let what = format!("{way:?}, double buffer {double_buffer}");
            assert_eq!(bits(&this.losses), bits(&first.losses), "losses: {what}");
            assert_eq!(bits(&this.grad_norms), bits(&first.grad_norms), "norms: {what}");
        }
    }
}

#[test]
fn on_two_ranks() {
    assert_bit_equal(2);
}

#[test]
fn on_three_ranks() {
    assert_bit_equal(3);
}

#[test]
fn on_four_ranks() {
    assert_bit_equal(4);
}
