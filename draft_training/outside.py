"""config.json of targets and drafts, whoever wrote it: every field that is read here, with its type and bounds, in one place.

Each class holds the fields that one reader needs, no more: a target that is drafted for by look-up alone may say what it likes
of its heads. Fields that are not listed are left unread. ``null`` is a field that is not there, as in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd
from reprlib import Repr
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from draft_training.errors import DraftConfigError

TARGET = "the target's config.json"
DRAFT = "the draft's config.json"
#: problems that one message names
_NAMED = 4

_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def _integral(value: Any) -> Any:
    """4096.0 is a whole number to JSON's own standard."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bounds(low: float, high: float) -> Any:
    return Field(ge=low, le=high, description=f"a whole number from {low} to {high}")


def _above(low: float, high: float) -> Any:
    return Field(gt=low, le=high, description=f"a number above {low:g}, at most {high:g}")


_Whole = Annotated[int, BeforeValidator(_integral)]
Vocabulary = Annotated[_Whole, _bounds(1, 1 << 24)]
Width = Annotated[_Whole, _bounds(1, 1 << 20)]
Layers = Annotated[_Whole, _bounds(1, 1 << 12)]
Heads = Annotated[_Whole, _bounds(1, 1 << 12)]
HeadDim = Annotated[_Whole, _bounds(1, 1 << 13)]
Positions = Annotated[_Whole, _bounds(1, 1 << 31)]
Count = Annotated[_Whole, _bounds(0, 1 << 31)]
Epsilon = Annotated[float, _above(0, 1)]
Theta = Annotated[float, _above(0, 1e15)]
Factor = Annotated[float, _above(0, 1e9)]
Number = Annotated[float, Field(description="a number")]
Switch = Annotated[bool, Field(description="true or false")]
Name = Annotated[str, Field(description="a text")]
Names = Annotated[list[str], Field(description="a list of texts")]
Ids = Annotated[list[Annotated[_Whole, Field(ge=0, le=1 << 12)]], Field(description="a list of layers, 0 to 4096")]
Part = Annotated[dict[str, Any], Field(description="a mapping")]


class Fields(BaseModel):
    """Of a config.json: text is no number, and true is none either."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class ModelSizes(Fields):
    """Of a target: what a draft must fit."""

    vocab_size: Vocabulary
    hidden_size: Width
    max_position_embeddings: Positions


class Stack(ModelSizes):
    """Of a target whose layers a draft reads."""

    num_hidden_layers: Layers


class ModelBasics(Fields):
    """Of any target, whatever drafts for it, or of a draft that is served as it is."""

    model_type: Name = ""
    architectures: Names = []
    vocab_size: Vocabulary | None = None
    tie_word_embeddings: Switch = False
    text_config: Part = {}


class Depth(Fields):
    """Of a target, or of its ``text_config``: behind its last layer some families keep that for multi-token prediction."""

    num_hidden_layers: Count = 0


class LogitScaling(Fields):
    """What a target does to its logits behind the LM head; names of several families."""

    final_logit_softcapping: Factor | None = None  # Gemma
    logit_scale: Number = 1.0  # Cohere, Llama's in vLLM
    logits_scaling: Number = 1.0  # Granite
    lm_head_multiplier: Number = 1.0  # Falcon H1
    dim_model_base: Width | None = None  # MiniCPM: the last state is scaled


class Layer(Fields):
    """One decoder layer; names and defaults are those of transformers' ``LlamaConfig``, through which vLLM reads drafts."""

    vocab_size: Vocabulary = 32000
    hidden_size: Width = 4096
    intermediate_size: Width = 11008
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    rms_norm_eps: Epsilon = 1e-6
    max_position_embeddings: Positions = 2048
    rope_theta: Theta | None = None
    rope_scaling: Part | None = None
    rope_parameters: Part | None = None
    partial_rotary_factor: Number | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads, key-value heads and head dimension, of which configs may leave out the latter two."""
        heads = self.num_attention_heads
        return heads, self.num_key_value_heads or heads, self.head_dim or self.hidden_size // heads


class Rotary(Fields):
    """What ``rope_scaling`` and ``rope_parameters`` may hold, whatever the type."""

    rope_theta: Theta | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    truncate: Switch = True


class TargetOfDraft(Layer):
    """A target for which a draft is made: it must say its sizes itself, but for what a draft has of its own."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width | None = None  # type: ignore[assignment]
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: Positions
    # of a layer of experts
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_local_experts: Count | None = None
    moe_num_experts: Count | None = None
    # of latent attention
    kv_lora_rank: Count | None = None
    v_head_dim: HeadDim | None = None

    @property
    def experts(self) -> int:
        """Experts of one layer; 0 of a dense target."""
        return self.num_experts or self.n_routed_experts or self.num_local_experts or self.moe_num_experts or 0

    @property
    def draft_mlp(self) -> int:
        """Width of the draft's dense MLP: the target's.

        Where the target has experts its ``intermediate_size`` may be that of one expert, or missing: below twice the hidden
        size it is not taken, but three times the hidden size, as dense models of these families have.

        Raises:
            DraftConfigError: for a target without experts that does not say it.
        """
        width = self.intermediate_size or 0
        if not width and not self.experts:
            raise DraftConfigError("lacks intermediate_size; give the whole config.json")
        return width if width and (not self.experts or width >= 2 * self.hidden_size) else 3 * self.hidden_size

    @property
    def draft_heads(self) -> tuple[int, int, int]:
        """Heads, key-value heads and head dimension of the draft: the target's.

        Of a target with latent attention, whose heads are expanded from a vector much shorter than they are together: as many
        as fit the hidden size, up to eight of them with keys and values of their own.
        """
        if not self.kv_lora_rank:
            return self.heads
        size = self.v_head_dim or 128
        heads = max(1, self.hidden_size // size)
        return heads, gcd(heads, 8), size


class DenseModel(TargetOfDraft):
    """A dense model whose own layers are trained, such as a small one that drafts."""

    model_type: Name
    intermediate_size: Width
    tie_word_embeddings: Switch = False


class MtpTarget(DenseModel):
    """A target whose own layer for multi-token prediction is trained."""

    rms_norm_eps: Epsilon


class Eagle3(Layer):
    """A draft in vLLM's, EAGLE's or NVIDIA's layout."""

    architectures: Names = []
    num_hidden_layers: Count = 1
    draft_vocab_size: Vocabulary | None = None
    target_hidden_size: Width | None = None
    eagle_aux_hidden_state_layer_ids: Ids = []
    eagle_config: Part = {}
    hidden_act: Name = "silu"
    logit_scale: Number = 1.0
    norm_before_residual: Switch = False
    norm_before_fc: Switch = False
    fc_norm: Switch = False
    norm_output: Switch = False
    attention_bias: Switch = False
    qkv_bias: Switch = False
    mlp_bias: Switch = False
    quantization_config: Part = {}
    layer_types: Names = []
    sliding_window: Count | None = None


class EagleConfig(Fields):
    """What ``eagle_config`` of such a draft may hold, in place of the config.json itself."""

    eagle_aux_hidden_state_layer_ids: Ids = []
    use_aux_hidden_state: Switch = True
    norm_before_fc: Switch = False


class Speculators(Fields):
    """A draft in speculators' layout; the rest is read as ``Eagle3``."""

    speculators_model_type: Name
    transformer_layer_config: Part = {}


class Index(Fields):
    """model.safetensors.index.json: which file of a folder holds which tensor."""

    weight_map: Annotated[dict[str, str], Field(description="a mapping of tensors to files")]


T = TypeVar("T", bound=Fields)


def read(kind: type[T], raw: Any, where: str) -> T:
    """Parse the fields that ``kind`` names; others are left unread.

    Args:
        kind: whose fields.
        raw: the parsed file.
        where: the file, for the message.

    Raises:
        DraftConfigError: naming each bad field, its value, the file and what was expected.
    """
    if not isinstance(raw, Mapping):
        raise DraftConfigError(f"{where} is {short_repr(raw)}: expected a mapping; give a whole config.json")
    try:
        return kind.model_validate({name: value for name, value in raw.items() if value is not None})
    except ValidationError as error:
        raise DraftConfigError(_sentence(kind, error, where)) from None


#: where a config.json of several parts has that for texts
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a config.json, whole or already cut, the part for texts; what only the whole says of tied embeddings stays."""
    part = next((hf[name] for name in _TEXT_PARTS if isinstance(hf.get(name), Mapping) and hf[name]), None)
    if part is None:
        return hf
    tied = hf.get("tie_word_embeddings", part.get("tie_word_embeddings"))
    return dict(part) if tied is None else {**part, "tie_word_embeddings": tied}


def is_size(value: object) -> bool:
    """Is it a whole number above 0, as a config.json's number of heads or experts."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def logit_cap(hf: Mapping[str, Any], where: str = TARGET) -> float | None:
    """The cap c of a target whose logits are c * tanh(last @ lm_head.T / c), which is what a draft learns; None: no cap.

    Args:
        hf: the target's config.json.
        where: its file, for the messages.

    Raises:
        DraftConfigError: for a target that scales its logits: the draft, whose head is the target's, would have to do so, too.
    """
    head = read(LogitScaling, text_part(hf), where)
    scaled = [name for name in ("logit_scale", "logits_scaling", "lm_head_multiplier") if getattr(head, name) != 1.0]
    scaled += ["dim_model_base"] if head.dim_model_base is not None else []
    if scaled:
        raise DraftConfigError(
            f"{scaled[0]}={getattr(head, scaled[0])} in {where}: a draft that is trained for a target which scales its logits is "
            "not supported; use a method that learns nothing (suffix, ngram)"
        )
    return head.final_logit_softcapping


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """Name the file in an error about numbers that do not go together."""
    try:
        yield
    except DraftConfigError as error:
        raise DraftConfigError(f"{where}: {error}") from None


def short_repr(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    return _repr.repr(value)


def _sentence(kind: type[Fields], error: ValidationError, where: str) -> str:
    problems = error.errors(include_url=False)
    missing = [str(p["loc"][0]) for p in problems if p["type"] == "missing"]
    sentences = [f"{where} lacks {', '.join(missing)}; give the whole config.json"] if missing else []
    wrong = {str(p["loc"][0]): p for p in problems if p["type"] != "missing"}
    sentences += [_problem(name, kind.model_fields[name], p, where) for name, p in list(wrong.items())[:_NAMED]]
    return "; ".join(sentences)


def _problem(name: str, field: FieldInfo, problem: Any, where: str) -> str:
    value = problem["input"]
    inside = "".join(f"[{part!r}]" for part in problem["loc"][1:])
    expected = _expected(field)
    hint = (
        ", without quotation marks"
        if isinstance(value, str) and expected.startswith(("a number", "a whole", "true"))
        else ""
    )
    return f"{name}{inside}={short_repr(value)} in {where}: expected {expected}{hint}; correct it there"


def _expected(field: FieldInfo) -> str:
    """What may stand there; of a field that may be left out, the description is one level down."""
    notes = [field, *(note for part in get_args(field.annotation) for note in getattr(part, "__metadata__", ()))]
    return next(note.description for note in notes if isinstance(note, FieldInfo) and note.description)
