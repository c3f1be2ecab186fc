"""What `config.json` holds in the families' public folders, with the names of our sizes."""

from typing import Any

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 32768, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_MIXTURE = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "output_gate_type": "swish",
    "unsloth_fixed_mtp": True, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
    "use_cache": True, "vocab_size": 32768,
}  # fmt: skip
_OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.51.3",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
_PHI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100257,
    "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.47.0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
PHI_MINI = _PHI | {
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_size": 3072, "intermediate_size": 8192,
    "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0 + number / 8 for number in range(48)], "short_factor": [1.0] * 48, "type": "longrope"
    },
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
"""Of Phi-4-mini, whose long factors are others. No size by name: the factors are only in the folder."""
_GLM = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
PUBLIC: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama3:8b", _LLAMA),
    "Llama 3.2 1B": (
        "llama3:1b",
        _LLAMA
        | {
            "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
            "unsloth_fixed": True, "pad_token_id": 128004,
        },
    ),
    "Qwen3 8B": ("qwen3:8b", _QWEN),
    "Qwen3 8B, saved by transformers 5": (
        "qwen3:8b",
        {key: value for key, value in _QWEN.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
        | {
            "dtype": "bfloat16", "layer_types": ["full_attention"] * 36, "pad_token_id": None,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "transformers_version": "5.24.0",
        },
    ),
    "Qwen3 30B-A3B": ("qwen3_moe:30b-a3b", _MIXTURE),
    "Qwen3 Coder 30B-A3B": (
        "qwen3_moe:30b-a3b",
        _MIXTURE
        | {
            "intermediate_size": 5472, "qkv_bias": False, "rope_theta": 1000000, "router_aux_loss_coef": 0.0,
            "shared_expert_intermediate_size": 0, "use_qk_norm": True,
        },
    ),
    "gpt-oss 20B": (
        "gpt_oss:20b",
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
            "vocab_size": 201088,
        },
    ),
    "DeepSeek-V3, in bfloat16": (
        "deepseek_v3:671b",
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
            "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        },
    ),
    "Qwen3-Next 80B-A3B": (
        "qwen3_next:80b-a3b",
        _MIXTURE
        | {
            "architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 4, "head_dim": 256,
            "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "model_type": "qwen3_next", "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
            "transformers_version": "4.57.0.dev0", "max_window_layers": None, "sliding_window": None,
        },
    ),
    "Qwen3.5 0.8B, its language model": (
        "qwen3_5:0.8b",
        _QWEN3_5
        | {
            "hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16, "num_attention_heads": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
    "Qwen3.5 27B, its language model": (
        "qwen3_5:27b",
        _QWEN3_5
        | {
            "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48, "num_attention_heads": 24,
            "num_hidden_layers": 64, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        },
    ),
    "Qwen3.5 35B-A3B, its language model": (
        "qwen3_5_moe:35b-a3b",
        _QWEN3_5
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 4096,
            "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "num_experts": 256,
            "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen2.5 0.5B": ("qwen2:0.5b", _QWEN2),
    "Qwen2.5 7B Instruct": (
        "qwen2:7b",
        _QWEN2
        | {
            "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
            "tie_word_embeddings": False, "vocab_size": 152064,
        },
    ),
    "Gemma 3 1B": (
        "gemma3:1b",
        {
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
        },
    ),
    "Mistral 7B v0.3": ("mistral:7b", _MISTRAL),
    "Ministral 8B": (
        "ministral:8b",
        _MISTRAL
        | {
            "head_dim": 128, "intermediate_size": 12288, "num_hidden_layers": 36, "rope_theta": 100000000.0,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9, "sliding_window": 32768,
            "vocab_size": 131072,
        },
    ),
    "SmolLM3 3B": (
        "smollm3:3b",
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
            "use_sliding_window": False, "vocab_size": 128256,
        },
    ),
    "OLMo 2 1B": ("olmo2:1b", _OLMO2),
    "OLMo 3 7B": (
        "olmo3:7b",
        _OLMO2
        | {
            "architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
            "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 100278,
        },
    ),
    "OLMoE 1B-7B": (
        "olmoe:7b-a1b",
        {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
            "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
        },
    ),
    "Phi-4": ("phi3:14b", _PHI),
    "Granite 3.3 2B": (
        "granite:2b",
        {
            "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.49.0",
            "use_cache": True, "vocab_size": 49159,
        },
    ),
    "GLM-4-9B-0414": ("glm4:9b", _GLM),
    "GLM-4.5-Air": (
        "glm4_moe:106b-a12b",
        _GLM
        | {
            "architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": 1, "intermediate_size": 10944,
            "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "topk_group": 1, "use_qk_norm": False,
        },
    ),
}  # fmt: skip
