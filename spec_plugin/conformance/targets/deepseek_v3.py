"""DeepSeek-V3: latent attention, a dense layer before those with experts. vLLM knows no other widths than 512 and 64 together."""

from spec_plugin.conformance.targets import TinyTarget

TARGET = TinyTarget(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "engine",
    changes={
        "num_key_value_heads": 2,
        "head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
)
