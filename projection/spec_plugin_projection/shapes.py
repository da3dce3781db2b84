"""Shapes of models: what of a config.json decides how much a forward pass reads and multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draft_training import files
from draft_training.config import fitting_vocabulary
from draft_training.errors import CheckpointError
from draft_training.outside import is_size, short_repr, text_part
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands.check import in_hub_cache
from spec_plugin_projection.experts import EXPERTS, TAKEN, Experts


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers, each with attention and either one MLP or experts of which each token takes some."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # units of a dense MLP; of one expert where there are some
    vocabulary: int
    tied: bool = False  # one matrix is embedding and head
    experts: int = 0  # of a layer; 0: dense
    experts_per_token: int = 0
    dense_intermediate: int = (
        0  # units of the MLP that a draft of this model gets, where ``intermediate`` is an expert's
    )
    window: int = 0  # tokens that some layers look back at most; they are counted as if they looked at all
    draft_vocabulary: int = 0  # tokens of the draft's head; 0: as many as a draft of ours gets
    source: str = "config.json"

    def with_whole_head(self) -> ModelShape:
        """The same, whose draft proposes any token: as those were that cards were measured with."""
        return replace(self, draft_vocabulary=self.vocabulary)

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert, or of the dense MLP: gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        """Read in every forward pass, whatever the tokens: attention, dense MLPs, the head. The embedding is only looked up."""
        mlp = 0 if self.experts else self.expert_parameters
        return self.layers * (self.attention_parameters + mlp) + self.hidden * self.vocabulary

    @property
    def active_parameters(self) -> int:
        """That take part in the forward pass of one token."""
        return self.shared_parameters + self.layers * self.experts_per_token * self.expert_parameters

    @property
    def parameters(self) -> int:
        """All, the embedding included; norms and biases, a thousandth, are left out."""
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.shared_parameters + embedding + self.layers * self.experts * self.expert_parameters

    def experts_touched(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens takes, if routing is even."""
        return self.mixture.touched(tokens) if self.mixture else 0.0

    @property
    def mixture(self) -> Experts | None:
        """The experts of a layer; None where it has one MLP."""
        return Experts(self.experts, self.experts_per_token) if self.experts else None

    def kv_bytes(self, bytes_per_number: float) -> float:
        """Bytes in the KV cache for one token of one request, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def forward_flops(self, context: float) -> float:
        """FLOP of one token's forward pass with so many tokens before it: 2 N + 4 layers heads head_dim context.

        PaLM, arXiv 2204.02311, appendix B, a third of its count for forward and backward pass.
        """
        return 2.0 * self.active_parameters + 4.0 * self.layers * self.heads * self.head_dim * context

    @property
    def draft_parameters(self) -> int:
        """Read in one forward pass of an EAGLE-3 draft: one layer whose attention reads two vectors, a fusion of three, the head.

        EAGLE-3, arXiv 2503.01840, section 3.1; ``draft_training.DraftConfig`` has the same shapes.
        """
        width = self.dense_intermediate or self.intermediate
        heads = self.hidden * self.head_dim * (2 * (self.heads + 2 * self.kv_heads) + self.heads)
        rest = 3 * self.hidden**2 + heads + 3 * self.hidden * width
        tokens = self.draft_vocabulary or fitting_vocabulary(rest, self.hidden, self.vocabulary)
        return rest + self.hidden * tokens


_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
#: all that are read
_SIZES = {*_NAMES, *EXPERTS, "intermediate_size", "moe_intermediate_size", "num_key_value_heads", "head_dim"}
#: what means layers that are not counted: latent attention, recurrent states, experts that every token takes
_NOT_COUNTED = (
    "kv_lora_rank",
    "ssm_state_size",
    "linear_num_value_heads",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "moe_num_shared_experts",
)
#: no size of a model is larger
_LARGEST = 1 << 24


def shape_of(config: Mapping[str, Any], name: str, source: str = "config.json") -> ModelShape:
    """Read a Hugging Face config.json.

    Raises:
        SpecConfigError: if it lacks a size, or describes layers of other kinds.
    """
    text = text_part(config)
    absurd = [key for key, value in text.items() if key in _SIZES and is_size(value) and value > _LARGEST]
    if absurd:
        said = f"{absurd[0]}={short_repr(text[absurd[0]])}"
        raise SpecConfigError(f"model {name}: {said} in its config.json: no model has that many; correct it there")
    missing = [key for key in _NAMES if not is_size(text.get(key))]
    if missing:
        raise SpecConfigError(
            f"model {name}: its config.json lacks {', '.join(missing)}, so what it reads is not known"
        )
    _refuse_nonsense(text, name)
    _refuse_other_kinds(config, name)
    odd = [k for k in _NOT_COUNTED if text.get(k)]
    if odd:
        raise SpecConfigError(
            f"model {name}: {odd[0]} in its config.json means layers that this projection does not count; take a model of plain "
            "attention and experts that is about as large"
        )

    def size(key: str, default: int) -> int:
        value = text.get(key)
        return value if isinstance(value, int) and is_size(value) else default

    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    experts = next((text[key] for key in EXPERTS if is_size(text.get(key))), 0)
    mixture = Experts.of(text)
    dense = size("intermediate_size", 4 * hidden)
    return ModelShape(
        name=name,
        hidden=hidden,
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        intermediate=size("moe_intermediate_size", dense) if experts else dense,
        vocabulary=text["vocab_size"],
        tied=text.get("tie_word_embeddings") is True,
        experts=experts,
        experts_per_token=mixture.taken if mixture else min(experts, 1),
        dense_intermediate=dense if experts else 0,
        window=_window(text),
        source=source,
    )


def _refuse_other_kinds(config: Mapping[str, Any], name: str) -> None:
    """Models that generate no text, and weights in which a number has other sizes than ``--dtype`` can say.

    Raises:
        SpecConfigError: naming what says so.
    """
    classes, quantized = config.get("architectures"), config.get("quantization_config")
    names = [str(one) for one in classes] if isinstance(classes, list) else []
    if names and not any(kind in one for one in names for kind in ("CausalLM", "ConditionalGeneration", "LMHead")):
        raise SpecConfigError(f"model {name}: architectures={short_repr(names)} in its config.json generate no text")
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    if method and method != "fp8":
        raise SpecConfigError(
            f"model {name}: quantization_config of {short_repr(method)} in its config.json: of quantized weights only fp8 is "
            "counted (--dtype fp8); take the model without it"
        )


def _refuse_nonsense(text: Mapping[str, Any], name: str) -> None:
    """Fields that are there, and no sizes; and heads or experts that do not go together.

    Raises:
        SpecConfigError: naming them.
    """
    given = {key: text[key] for key in (*sorted(_SIZES), *TAKEN) if text.get(key) is not None}
    none = [key for key, value in given.items() if not is_size(value) and not (value == 0 and key not in _NAMES)]
    heads, kv_heads = given["num_attention_heads"], given.get("num_key_value_heads") or given["num_attention_heads"]
    total, taken = (next((given[key] for key in keys if given.get(key)), 0) for keys in (EXPERTS, TAKEN))
    why = ""
    if none:
        why = f"{none[0]}={short_repr(given[none[0]])}: expected a whole number above 0"
    elif heads % kv_heads:
        why = f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
    elif taken > total:
        why = f"{taken} experts a token ({' or '.join(TAKEN)}) of {total}"
    elif not given.get("head_dim") and given["hidden_size"] % heads:
        why = f"hidden_size={given['hidden_size']} is no multiple of num_attention_heads={heads}, and there is no head_dim"
    elif given["hidden_size"] < (given.get("head_dim") or 1):
        why = f"hidden_size={given['hidden_size']} is less than head_dim={given['head_dim']}"
    if why:
        raise SpecConfigError(f"model {name}: {why} in its config.json; correct it there")


def _window(text: Mapping[str, Any]) -> int:
    """Tokens that some layers look back, 0 where all look at everything."""
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    used = text.get("use_sliding_window", True) is True and (not kinds or "sliding_attention" in kinds)
    return window if used and isinstance(window, int) and is_size(window) else 0


def _known(name: str, *sizes: int, moe: tuple[int, int, int] = (0, 0, 0), **more: Any) -> ModelShape:
    names = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
    of_mixtures = ("experts", "experts_per_token", "dense_intermediate")
    given = dict(zip(names, sizes, strict=True)) | dict(zip(of_mixtures, moe, strict=True)) | more
    return ModelShape(name=name, source="config.json of its Hugging Face repository", **given)


#: well-known models: hidden, layers, heads, KV heads, head size, MLP units, vocabulary; of a mixture also the experts of a layer,
#: those of a token, and the MLP units of a draft
MODELS: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        _known("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936, tied=True),
        _known("Qwen3-1.7B", 2048, 28, 16, 8, 128, 6144, 151936, tied=True),
        _known("Qwen3-4B", 2560, 36, 32, 8, 128, 9728, 151936, tied=True),
        _known("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936),
        _known("Qwen3-14B", 5120, 40, 40, 8, 128, 17408, 151936),
        _known("Qwen3-32B", 5120, 64, 64, 8, 128, 25600, 151936),
        _known("Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 768, 151936, moe=(128, 8, 6144)),
        _known("Qwen3-235B-A22B", 4096, 94, 64, 4, 128, 1536, 151936, moe=(128, 8, 12288)),
        _known("Qwen2.5-7B", 3584, 28, 28, 4, 128, 18944, 152064),
        _known("Qwen2.5-32B", 5120, 64, 40, 8, 128, 27648, 152064),
        _known("Qwen2.5-72B", 8192, 80, 64, 8, 128, 29568, 152064),
        _known("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256),
        _known("Llama-3.1-70B", 8192, 80, 64, 8, 128, 28672, 128256),
        _known("Llama-3.1-405B", 16384, 126, 128, 8, 128, 53248, 128256),
        _known("gpt-oss-20b", 2880, 24, 64, 8, 64, 2880, 201088, moe=(32, 4, 2880), window=128),
        _known("gpt-oss-120b", 2880, 36, 64, 8, 64, 2880, 201088, moe=(128, 4, 2880), window=128),
        _known("Mistral-7B-v0.3", 4096, 32, 32, 8, 128, 14336, 32768),
        _known("Mixtral-8x7B-v0.1", 4096, 32, 32, 8, 128, 14336, 32000, moe=(8, 2, 14336)),
    )
}


def find_model(name: str) -> ModelShape:
    """A model of a folder with a config.json or of such a file, of the table, or of the hub's cache on this machine.

    Args:
        name: of the table with or without its organisation; of the hub with it.

    Raises:
        SpecConfigError: if it is neither, or the file is not one.
    """
    known = MODELS.get(name.rsplit("/", 1)[-1].lower().removesuffix("-base").removesuffix("-instruct"))
    file = _file(name)
    if file is None and known is not None:
        return known
    called = file.resolve().parent.name if file else name
    if file is None and (cached := in_hub_cache(name)) is not None:
        file = Path(cached)
    if file is None:
        raise SpecConfigError(
            f"model {short_repr(name)} is neither known nor a folder with a config.json nor in the hub's cache here; known are "
            f"{', '.join(shape.name for shape in MODELS.values())}"
        )
    try:
        config = files.read_json(file)
    except CheckpointError as error:
        raise SpecConfigError(f"model {name}: {error}") from error
    if not isinstance(config.get("text_config", {}), dict):
        raise SpecConfigError(f"model {name}: {file} holds no object, so it is not a config.json")
    return shape_of(config, called, str(file))


def _file(name: str) -> Path | None:
    path = Path(name)
    try:
        file = path / "config.json" if path.is_dir() else path
        return file if file.is_file() else None
    except OSError:  # a name that no file can have
        return None
