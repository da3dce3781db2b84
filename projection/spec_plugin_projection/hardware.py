"""GPUs: what a projection must know of one, from its vendor's data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from spec_plugin.api.errors import SpecConfigError

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Card:
    """Peak numbers of one GPU, dense (not of structured sparsity); what is reached of them is a constant of its own."""

    name: str
    bandwidth: float  # bytes/s of its memory
    flops: float  # FLOP/s of 16-bit products
    flops_8bit: float  # FLOP/s of 8-bit products; as ``flops`` where it has none
    memory: float  # bytes
    link: float  # bytes/s to its neighbours, one direction
    source: str

    def flops_of(self, bytes_per_weight: float) -> float:
        """FLOP/s of products with weights of so many bytes; 4-byte weights are counted as half as fast as 16-bit ones."""
        if bytes_per_weight <= 1:
            return self.flops_8bit
        return self.flops if bytes_per_weight <= 2 else self.flops / 2


def _card(
    name: str,
    tbytes: float,
    tflops: float,
    tflops_8bit: float,
    gbytes: float,
    gbytes_link: float,
    source: str,
    vendor: str = "NVIDIA",
) -> Card:
    return Card(
        name,
        tbytes * _TERA,
        tflops * _TERA,
        tflops_8bit * _TERA,
        gbytes * _GIGA,
        gbytes_link * _GIGA,
        f"{vendor} data sheet: {source}",
    )


#: name -> card. Data sheets give sparse products and links in both directions: both are halved here.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("A100", 2.039, 312, 312, 80, 300, "A100 80GB SXM"),
        _card("A800", 2.039, 312, 312, 80, 200, "A800 80GB SXM"),
        _card("H100", 3.35, 989, 1979, 80, 450, "H100 SXM"),
        _card("H800", 3.35, 989, 1979, 80, 200, "H800 SXM"),
        _card("H200", 4.8, 989, 1979, 141, 450, "H200 SXM"),
        _card("H20", 4.0, 148, 296, 96, 450, "H20"),
        _card("B200", 8.0, 2250, 4500, 180, 900, "HGX B200, an eighth"),
        _card("GB200", 8.0, 2500, 5000, 186, 900, "GB200 NVL72, a 72nd"),
        _card("L40S", 0.864, 362, 733, 48, 32, "L40S, PCIe 4.0 x16"),
        _card("MI300X", 5.3, 1307, 2615, 192, 448, "Instinct MI300X; the shares of the peak are an H100's", "AMD"),
    )
}


def find_card(name: str) -> Card:
    """The card of this name, in any case.

    Raises:
        SpecConfigError: if it is not in the table.
    """
    found = CARDS.get(name.upper())
    if found is None:
        raise SpecConfigError(f"card {name!r} is not known; known are {', '.join(CARDS)}")
    return found
