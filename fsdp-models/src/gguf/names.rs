//! Names of a Llama's tensors: llama.cpp's, and those of Hugging Face's checkpoints.

/// What is outside the blocks.
const MODEL: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// What is in `blk.N.` here and in `model.layers.N.` there.
const BLOCK: [(&str, &str); 9] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", Q_PROJ),
    ("attn_k.weight", K_PROJ),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
];

const Q_PROJ: &str = "self_attn.q_proj.weight";
const K_PROJ: &str = "self_attn.k_proj.weight";

/// What a projection's rows belong to, if llama.cpp keeps them in its rotary order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rotary {
    /// Query heads.
    Queries,
    /// Key heads.
    Keys,
}

/// Hugging Face's name of a tensor, and whether its rows are in another order there. `None` if it has none.
pub(super) fn translate(name: &str) -> Option<(String, Option<Rotary>)> {
    if let Some((_, theirs)) = MODEL.iter().find(|(ours, _)| *ours == name) {
        return Some(((*theirs).to_owned(), None));
    }
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    // Two spellings of one number would be two tensors of one name.
    if block.parse::<usize>().ok()?.to_string() != block {
        return None;
    }
    let (_, theirs) = BLOCK.iter().find(|(ours, _)| *ours == rest)?;
    let rotary = match *theirs {
        Q_PROJ => Some(Rotary::Queries),
        K_PROJ => Some(Rotary::Keys),
        _ => None,
    };
    Some((format!("model.layers.{block}.{theirs}"), rotary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated_one_to_one() {
        let hugging_face = |name| translate(name).map(|(name, _)| name);
        assert_eq!(hugging_face("token_embd.weight").unwrap(), "model.embed_tokens.weight");
        assert_eq!(hugging_face("blk.12.ffn_up.weight").unwrap(), "model.layers.12.mlp.up_proj.weight");
        assert_eq!(
            translate("blk.0.attn_q.weight").unwrap(),
            ("model.layers.0.self_attn.q_proj.weight".to_owned(), Some(Rotary::Queries))
        );
        for unknown in
            ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.01.attn_q.weight", "blk.x.attn_q.weight"]
        {
            assert_eq!(translate(unknown), None, "{unknown}");
        }
    }
}
