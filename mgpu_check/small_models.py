"""Sizes of a small model, under the names that the configurations of transformers have for them."""

from __future__ import annotations

from typing import Any

SIZES = {
    key: size
    for size, keys in (
        (32, "hidden_size d_model n_embd embed_dim word_embed_proj_dim dim d_kv projection_dim embedding_size"),
        (64, "intermediate_size moe_intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim"),
        (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (4, "num_local_experts num_experts n_routed_experts"),
    )
    for key in keys.split()
} | {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512}
SIZES |= {"pad_token_id": 0, "bos_token_id": 5, "eos_token_id": 6}


def small_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a small model, in place of those of a configuration of transformers."""
    small = {key: size for key, size in SIZES.items() if isinstance(getattr(config, key, None), int)}
    parts = {part: getattr(config, part, None) for part in ("text_config", "vision_config")}
    return small | {part: small_settings(inner) for part, inner in parts.items() if hasattr(inner, "to_dict")}
