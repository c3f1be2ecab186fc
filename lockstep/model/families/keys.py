"""The keys of `config.json`: those that are read, those with one supported value, and those without effect.

Any other key is refused by name, so that nothing that changes results is ignored.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.model.families.rope import TOP_LEVEL

READ = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "reduction_chunks",
    "precision", "dtype", "torch_dtype", "quantization_config", "num_labels", "id2label", "label2id", *TOP_LEVEL,
}  # fmt: skip
"""Keys that are read for every family; those of one family are in its `DEFAULTS`."""

ONLY = {
    "hidden_act": "silu",
    "activation": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "is_encoder_decoder": False,
    "attention_dropout": 0,
}
"""Settings that would change results (dropout: of training), and their only supported value; a family's `ONLY` adds to
these."""

WITHOUT_EFFECT = {
    # The folder's origin.
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map", "custom_pipelines",
    "unsloth_fixed", "unsloth_fixed_mtp", "unsloth_version", "transformers.js_config", "is_llama_config",
    # Initialization.
    "initializer_range", "pretraining_tp",
    # Implementation, and additional outputs.
    "use_cache", "cache_implementation", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
    "_experts_implementation_internal", "gradient_checkpointing", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_return_dict",
    "chunk_size_feed_forward", "pruned_heads",
    # For encoders and classifiers; older transformers wrote them for every model.
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "finetuning_task",
    "task_specific_params", "problem_type", "prefix",
    # The tokenizer.
    "tokenizer_class", "sep_token_id", "unk_token_id", "decoder_start_token_id", "model_max_length",
    "max_sequence_length", "seq_length",
    # Sampling, which transformers 5 only reads from generation_config.json.
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "target_lookbehind",
    "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
"""Keys that transformers does not read for any family, or that do not change log-probabilities, losses and gradients; a
family's `WITHOUT_EFFECT` adds to these."""

NULL_IS_MISSING = (
    "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "layer_types"
)  # fmt: skip
"""Keys whose null means missing; a family's `NULL_IS_MISSING` adds to these. Other nulls are values: no end token for
`eos_token_id`, as many as heads for `num_key_value_heads`."""


def unknown_keys(values: dict[str, Any], family: ModuleType) -> list[str]:
    """The keys that are not known for a family, sorted."""
    known = read_keys(family) | WITHOUT_EFFECT | getattr(family, "WITHOUT_EFFECT", set())
    return sorted(key for key, value in values.items() if key not in known and value is not None)


def unsupported(values: dict[str, Any], family: ModuleType) -> dict[str, Any]:
    """The keys whose value is not the only supported one, with that one."""
    given = {key: value for key, value in _only(family).items() if values.get(key) is not None}
    return {key: value for key, value in given.items() if values[key] != value}


def read_keys(family: ModuleType) -> set[str]:
    """The keys that may change what a family's model computes."""
    return READ | family.DEFAULTS.keys() | _only(family).keys() | getattr(family, "ALIASES", {}).keys()


def _only(family: ModuleType) -> dict[str, Any]:
    return {key: value for key, value in ONLY.items() if key not in family.DEFAULTS} | getattr(family, "ONLY", {})


def refuse_unknown(values: dict[str, Any], family: ModuleType, where: str) -> None:
    """Raises UserError for an unknown key, and for an unsupported value."""
    if unknown := unknown_keys(values, family):
        others = f" The same holds for {', '.join(unknown[1:])}." if unknown[1:] else ""
        raise UserError(
            f"{where}: key {unknown[0]} is not known for {family.MODEL_TYPE}; it could change what the model computes."
            f"{closest(unknown[0], read_keys(family))}{others} Remove what has no effect"
        )
    for key, value in unsupported(values, family).items():
        raise UserError(f"{where}: {key} is {values[key]!r:.100}; only {value!r} is supported")


def with_defaults(values: dict[str, Any], family: ModuleType) -> dict[str, Any]:
    """The values, with the family's defaults for missing keys, which are those of its class in transformers."""
    missing = {*NULL_IS_MISSING, *getattr(family, "NULL_IS_MISSING", ())}
    given = {key: value for key, value in values.items() if value is not None or key not in missing}
    # As in transformers, an alias takes precedence over the key.
    renamed = {key: given[alias] for alias, key in getattr(family, "ALIASES", {}).items() if alias in given}
    return family.DEFAULTS | given | renamed
