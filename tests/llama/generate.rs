//! Completions by a sharded Llama: the same tokens on every rank and for any number of ranks.

use fsdp::launch::Launcher;
use fsdp::prelude::*;
use fsdp_models::generate::{Sampling, generate};
use fsdp_models::{Llama, LlamaConfig, Result};

const POSITIONS: usize = 24;

fn config() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        vocab_size: 40,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: true,
        max_position_embeddings: POSITIONS,
        initializer_range: 0.5,
        head_dim: None,
    }
}

/// What each rank gets.
fn completions(ranks: usize, prompt: &[u32], sampling: &Sampling) -> Vec<Vec<u32>> {
    let complete = |world: launch::World| -> Result<Vec<u32>> {
        let model = Llama::new(&config())?.fully_shard(&world.data_parallel_mesh())?;
        let tokens = generate(&model, prompt, sampling)?;
        assert!(model.gathered_units().is_empty());
        Ok(tokens)
    };
    Launcher::new().ranks(ranks).run(complete).unwrap()
}

#[test]
fn all_ranks_and_all_numbers_of_ranks_get_the_same_tokens() {
    for sampling in [
        Sampling { temperature: 0.0, ..Sampling::default() },
        Sampling { max_tokens: 12, ..Sampling::default() },
        Sampling { temperature: 2.0, top_k: None, top_p: 1.0, ..Sampling::default() },
    ] {
        let one = completions(1, &[3, 1, 4], &sampling);
        assert_eq!(one[0].len(), sampling.max_tokens.min(POSITIONS - 3));
        for ranks in [2, 3] {
            assert_eq!(completions(ranks, &[3, 1, 4], &sampling), vec![one[0].clone(); ranks]);
        }
    }
}

#[test]
fn a_completion_goes_on_from_where_another_has_stopped() {
    let sampling = |max_tokens| Sampling { max_tokens, ..Sampling::default() };
    let whole = completions(2, &[7, 8], &sampling(10)).remove(0);
    let first = completions(2, &[7, 8], &sampling(4)).remove(0);
    assert_eq!(first, whole[..4]);
    let rest = completions(2, &[&[7, 8][..], &first].concat(), &sampling(6)).remove(0);
    assert_eq!(rest, whole[4..]);
}

#[test]
fn the_end_of_a_text_ends_it_and_is_not_shown() {
    let sampling = Sampling { max_tokens: 10, ..Sampling::default() };
    let whole = completions(2, &[7, 8], &sampling).remove(0);
    let eos = whole[5];
    let first = whole.iter().position(|&id| id == eos).unwrap();
    let ended = |ends: &[u32]| completions(2, &[7, 8], &Sampling { ends: ends.to_vec(), ..sampling.clone() });
    assert_eq!(ended(&[eos]), [&whole[..first], &whole[..first]]);
    // Of several, the one that comes first; one that never comes changes nothing.
    let never = (0..).find(|id| !whole.contains(id)).unwrap();
    assert_eq!(ended(&[never, eos]), ended(&[eos]));
    let earlier = whole.iter().position(|id| *id == whole[2]).unwrap();
    for ends in [[eos, whole[2]], [whole[2], eos]] {
        assert_eq!(ended(&ends)[0], whole[..first.min(earlier)]);
    }
    assert_eq!(ended(&[never])[0], whole);
}

#[test]
fn prompts_that_are_empty_or_too_long_are_refused() {
    let message = |prompt: &[u32]| {
        let model = Llama::new(&config()).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
        generate(&model, prompt, &Sampling::default()).unwrap_err().to_string()
    };
    assert_eq!(message(&[]), "the prompt is empty: at least one token is needed to begin with");
    assert_eq!(message(&[1; POSITIONS + 1]), "a prompt of 25 tokens is too long for a model of 24 positions");
    // The model's word on a token that it does not have.
    assert!(message(&[40]).contains("40"), "{}", message(&[40]));
    assert_eq!(completions(1, &[1; POSITIONS], &Sampling::default()), [[0u32; 0]]);
}
