"""DeepSeek-V3: latent attention, a dense layer before those with experts. vLLM knows no other widths than 512 and 64 together."""

from spec_plugin_conformance.targets import TinyTarget

TARGET = TinyTarget(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    tokens=("<\uff5cend\u2581of\u2581sentence\uff5c>",),  # verl asks for it
    # vLLM's CPU kernel of latent attention wants blocks of 16 tokens, and that of the draft's plain attention of 32
    environment={"VLLM_MLA_DISABLE": "1"},
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
