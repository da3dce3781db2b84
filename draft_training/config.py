"""DraftConfig: the shape of an EAGLE-3 draft, data alone: derived from a target's config and written as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.outside import (
    DRAFT,
    TARGET,
    Eagle3,
    EagleConfig,
    Stack,
    TargetOfDraft,
    blaming,
    read,
    short_repr,
    text_part,
)
from draft_training.rope import Rope

ARCHITECTURE = "LlamaForCausalLMEagle3"

#: numbers of a draft's own from which its config.json is taken for wrong: four times those of a draft for 405B parameters
_MOST_PARAMETERS = 1 << 34
#: layers of a target in which vLLM's own choice of auxiliary layers are three
_LEAST_OF_VLLM = 7
#: most tokens of a vocabulary that is pruned unasked: of a policy's text more are hardly ever missed
_MOST_TOKENS = 1 << 15


def fitting_vocabulary(rest: int, hidden_size: int, vocab_size: int) -> int:
    """So many tokens of a draft's vocabulary that its head reads no more than the rest of it does, a power of two.

    All of them where the head would still read more than half as much as an unpruned one.

    Args:
        rest: how many numbers the draft has beside its head.
        hidden_size: of the draft.
        vocab_size: of the target.
    """
    size = min(_MOST_TOKENS, 1 << max(0, (rest // hidden_size).bit_length() - 1))
    return size if 2 * size <= vocab_size else vocab_size


@dataclass(frozen=True)
class DraftConfig:
    """Shape of an EAGLE-3 draft: one decoder layer over the target's hidden states.

    ``aux_layers`` follows vLLM's convention: id i is the hidden state that *enters* the target's layer i.
    Attention has no bias. vLLM's CPU attention refuses ``head_dim`` below 32 when the first request runs.
    """

    vocab_size: int  # V, the target's
    draft_vocab_size: int  # equal to vocab_size unless pruned
    hidden_size: int  # H, the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    aux_layers: tuple[int, ...]  # ascending, distinct
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    max_position_embeddings: int = 2048  # of the longest text, less what the rope's own scaling adds
    norm_before_residual: bool = False  # True: the residual starts from the normed hidden state (speculators' option)
    #: True: what is fed back is the normed output, not the residual stream, which grows with each step (EAGLE-3.1)
    norm_output: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes that no engine serves."""
        ids = self.aux_layers
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise DraftConfigError(
                f"aux_layers={list(ids)} must be ascending, distinct and not negative: the engine sorts and merges them"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DraftConfigError(
                f"draft_vocab_size={self.draft_vocab_size} must lie between 1 and the target's vocab_size={self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2 or self.head_dim < 2:
            raise DraftConfigError(
                f"head layout heads={self.num_heads}, kv heads={self.num_kv_heads}, head_dim={self.head_dim}: heads must "
                "be a multiple of kv heads, and head_dim even; correct them there"
            )
        if self.parameters > _MOST_PARAMETERS:
            raise DraftConfigError(
                f"a draft of these sizes has {self.parameters / 1e9:.0f} billion parameters (hidden_size={self.hidden_size}, "
                f"intermediate_size={self.intermediate_size}, vocab_size={self.vocab_size}, heads={self.num_heads} of "
                f"{self.head_dim}): one of them is wrong; correct it there"
            )

    @property
    def pruned(self) -> bool:
        """True when the draft has a smaller vocabulary, and so an LM head of its own."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def parameters(self) -> int:
        """How many numbers the draft has of its own; its embedding, and an unpruned LM head, are the target's."""
        h, m = self.hidden_size, self.intermediate_size
        attention = (2 * h) * (
            self.num_heads + 2 * self.num_kv_heads
        ) * self.head_dim + self.num_heads * self.head_dim * h
        head = h * self.draft_vocab_size if self.pruned else 0
        return len(self.aux_layers) * h * h + attention + 3 * h * m + 4 * h + head

    @property
    def fitting_vocabulary(self) -> int:
        """See :func:`fitting_vocabulary`."""
        rest = replace(self, draft_vocab_size=self.vocab_size).parameters
        return fitting_vocabulary(rest, self.hidden_size, self.vocab_size)

    @classmethod
    def from_target(
        cls,
        hf_config: Mapping[str, Any],
        *,
        draft_vocab_size: int | None = None,
        aux_layers: Sequence[int] | None = None,
        length: int | None = None,
        where: str = TARGET,
    ) -> DraftConfig:
        """The draft for a target, of whatever family: a model of its own, that needs the target's width and vocabulary.

        It feeds back its normed output (``norm_output``), so that positions beyond the unrolled ones are drafted well, too. It
        attends to the whole text even where the target has windows, latent attention or no attention at all; its MLP is dense
        where the target's has experts (``TargetOfDraft.draft_mlp``); its rotary embedding may be plainer (``Rope.for_draft_of``).
        What it proposes is verified, so none of this can change what is sampled.

        Args:
            hf_config: the target's config.json as a dict, whole or its part for texts.
            draft_vocab_size: size of a pruned vocabulary; None: the target's own.
            aux_layers: target layers whose input feeds the draft; None: see ``default_aux_layers``.
            length: tokens of the longest text that the engine serves; None: what the target's config.json says.
            where: the file of ``hf_config``, for the messages.

        Raises:
            DraftConfigError: saying what is wrong, with the value, and what to set.
        """
        text = text_part(hf_config)
        target = read(TargetOfDraft, text, where)
        layers, (heads, kv_heads, head_dim) = target.num_hidden_layers, target.draft_heads
        rope = Rope.for_draft_of(text, where, length or 0)
        with blaming(where):
            return cls(
                vocab_size=target.vocab_size,
                draft_vocab_size=draft_vocab_size or target.vocab_size,
                hidden_size=target.hidden_size,
                intermediate_size=target.draft_mlp,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                aux_layers=default_aux_layers(layers) if aux_layers is None else _within(aux_layers, layers),
                rms_norm_eps=target.rms_norm_eps,
                rope=rope,
                max_position_embeddings=rope.positions_for(length or 0, target.max_position_embeddings),
                norm_output=True,
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, target_layers: int | None = None, where: str = DRAFT) -> DraftConfig:
        """Read a draft's config.json in vLLM's layout; keys that it lacks are what vLLM would take.

        Args:
            hf: the parsed config.json.
            target_layers: layers of the target, needed only if ``hf`` names no auxiliary layers.
            where: the file of ``hf``, for the messages.

        Raises:
            DraftConfigError: for another architecture, more than one layer, an option that we cannot train, or a bad value.
        """
        fields = read(Eagle3, hf, where)
        nested = read(EagleConfig, fields.eagle_config, f"eagle_config of {where}")
        _refuse_variants(fields, nested, where)
        ids = fields.eagle_aux_hidden_state_layer_ids or nested.eagle_aux_hidden_state_layer_ids
        if not ids and target_layers is None:
            raise DraftConfigError(
                f"{where} names no eagle_aux_hidden_state_layer_ids; give the target's config, or add them"
            )
        if (fields.target_hidden_size or fields.hidden_size) != fields.hidden_size:
            raise DraftConfigError(
                f"target_hidden_size={fields.target_hidden_size} differs from the draft's hidden_size={fields.hidden_size} "
                f"({where}); drafts of another width than their target are not supported"
            )
        rope, (heads, kv_heads, head_dim) = Rope.from_hf(hf, where), fields.heads
        with blaming(where):
            return cls(
                vocab_size=fields.vocab_size,
                draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
                hidden_size=fields.hidden_size,
                intermediate_size=fields.intermediate_size,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                aux_layers=tuple(ids) if ids else vllm_aux_layers(target_layers or 0),
                rms_norm_eps=fields.rms_norm_eps,
                rope=rope,
                max_position_embeddings=fields.max_position_embeddings,
                norm_before_residual=fields.norm_before_residual,
                norm_output=fields.norm_output,
            )

    def to_hf(self) -> dict[str, Any]:
        """config.json in vLLM's ``LlamaForCausalLMEagle3`` layout, readable by transformers 4 and 5."""
        scaling = self.rope.scaling_to_hf()
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope.theta},
            **({"rope_scaling": scaling} if scaling else {}),
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "norm_before_residual": self.norm_before_residual,
            **({"norm_output": True} if self.norm_output else {}),
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "num_aux_hidden_states": len(self.aux_layers),
        }


def default_aux_layers(layers: int) -> tuple[int, ...]:
    """For a new draft of a target of ``layers`` layers: vLLM's choice; of fewer than seven, its second, middle and last one.

    What enters the first layer is the embedding, which the draft reads anyway.
    """
    if layers >= _LEAST_OF_VLLM:
        return vllm_aux_layers(layers)
    return tuple(sorted({min(i, layers - 1) for i in (1, layers // 2, layers - 1)}))


def vllm_aux_layers(layers: int) -> tuple[int, ...]:
    """What vLLM takes where a draft does not say: (2, L // 2, L - 3).

    Raises:
        DraftConfigError: if the target is too shallow for three distinct ascending ids.
    """
    ids = (2, layers // 2, layers - 3)
    if layers < _LEAST_OF_VLLM:
        raise DraftConfigError(
            f"the draft names no auxiliary layers, and vLLM's own {ids} collide in a target of {layers} layers: name them as "
            "eagle_aux_hidden_state_layer_ids in the draft's config.json"
        )
    return ids


def validate_draft(config: DraftConfig, target_config: Mapping[str, Any], where: str = TARGET) -> None:
    """Check that a draft fits a target.

    Args:
        config: the draft.
        target_config: the target's config.json as a dict.
        where: its file, for the messages.

    Raises:
        DraftConfigError: for another hidden size or vocabulary, and for auxiliary layers that the target lacks.
    """
    target = read(Stack, text_part(target_config), where)
    for name in ("hidden_size", "vocab_size"):
        if (ours := getattr(config, name)) != (theirs := getattr(target, name)):
            raise DraftConfigError(
                f"the draft's {name}={ours} differs from the target's {theirs}; it was made for another target"
            )
    _within(config.aux_layers, target.num_hidden_layers)


def _within(ids: Sequence[int], layers: int) -> tuple[int, ...]:
    if any(not 0 <= int(i) < layers for i in ids):
        raise DraftConfigError(
            f"aux_layers={list(ids)}: the target has layers 0 to {layers - 1}; choose ids among them"
        )
    return tuple(int(i) for i in ids)


#: of a draft that this trainer does not implement
_VARIANTS = ("norm_before_fc", "fc_norm", "attention_bias", "qkv_bias", "mlp_bias", "quantization_config")


def _refuse_variants(fields: Eagle3, nested: EagleConfig, where: str) -> None:
    if (named := fields.architectures or [ARCHITECTURE])[0] not in (ARCHITECTURE, "Eagle3LlamaForCausalLM"):
        raise DraftConfigError(
            f"architectures={short_repr(named)} in {where}: only {ARCHITECTURE} drafts can be trained"
        )
    if fields.num_hidden_layers not in (0, 1):
        raise DraftConfigError(
            f"num_hidden_layers={fields.num_hidden_layers} in {where}: only drafts of one layer can be trained"
        )
    on = [name for name in _VARIANTS if getattr(fields, name)]
    if "sliding_attention" in fields.layer_types and fields.sliding_window:  # as vLLM's decoder layer of Llama reads it
        on.append(f"sliding_window={fields.sliding_window}")
    on += ["eagle_config.norm_before_fc"] if nested.norm_before_fc else []
    on += [f"logit_scale={fields.logit_scale}"] if fields.logit_scale != 1.0 else []
    on += ["eagle_config.use_aux_hidden_state=false"] if not nested.use_aux_hidden_state else []
    on += [f"hidden_act={short_repr(fields.hidden_act)}"] if fields.hidden_act != "silu" else []
    if on:
        raise DraftConfigError(
            f"{where} sets {', '.join(on)}, which this trainer does not implement; start from a draft without it, or from none"
        )
