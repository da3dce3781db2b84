"""Forward hooks on a policy that keep, of one forward pass, what enters some layers and what leaves the final norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from spec_plugin.trainer.decoder import Decoder

#: among the states of a pass, beside the indices of layers: the output of the final norm
LAST = -1


class Taps:
    """What the hooked modules saw of the last forward pass; the hooks are there only inside ``attached``.

    What enters layer i is the residual stream, vLLM's EAGLE-3 convention: the output of layer i - 1 with the residual added.
    """

    def __init__(self, inputs: Mapping[int, nn.Module], norm: nn.Module | None) -> None:
        """Hook these modules.

        Args:
            inputs: by the index under which ``states`` gives it, in ascending order: what this module is given.
            norm: the final one, whose output is wanted, too; None where another rank has it.
        """
        self._inputs, self._norm = dict(inputs), norm
        self._seen: dict[int, Tensor] = {}
        self._select: Callable[[Tensor], Tensor] = lambda state: state
        self._trouble: Exception | None = None  # of a hook, which must not stop the trainer's forward pass

    @classmethod
    def of(cls, decoder: Decoder, layers: Sequence[int]) -> Taps:
        """On a whole decoder.

        Args:
            decoder: of the policy's language model, see ``find_decoder``.
            layers: ascending; the number of layers is one more index: the residual stream that enters the final norm.
        """
        modules = [*decoder.layers, decoder.norm]
        return cls({i: modules[i] for i in layers}, decoder.norm)

    @contextmanager
    def attached(self, select: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
        """Hook the forward passes inside the block; nothing stays behind afterwards.

        Args:
            select: takes from what a module saw what is to be kept: the rest need not stay on the card until the pass ends.
        """
        self._select = select or (lambda state: state)
        handles: list[Any] = [
            module.register_forward_pre_hook(self._input(index), with_kwargs=True)
            for index, module in self._inputs.items()
        ]
        if self._norm is not None:
            handles.append(self._norm.register_forward_hook(self._output))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _input(self, index: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(index, lambda: args[0] if args else kwargs["hidden_states"])

        return hook

    def _output(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._keep(LAST, lambda: output)

    def _keep(self, index: int, state: Callable[[], Tensor]) -> None:
        try:
            self._seen[index] = self._select(state().detach())
        except Exception as error:  # law 6; ``states`` raises it
            self._trouble = error

    def states(self) -> dict[int, Tensor]:
        """By layer, ascending, the output of the final norm behind them; shapes are the model's own, or what ``select`` gave.

        Raises:
            RuntimeError: if a hooked module was not called as expected.
        """
        if self._trouble is not None:
            raise RuntimeError(
                f"a hook on the decoder's layers could not read their states: {self._trouble}"
            ) from self._trouble
        wanted = [*self._inputs, *([] if self._norm is None else [LAST])]
        if any(index not in self._seen for index in wanted):
            raise RuntimeError(
                "no hidden states were captured: this forward pass did not run the hooked decoder layers"
            )
        return {index: self._seen[index] for index in wanted}

    def forget(self) -> None:
        """Let go of what the last forward pass left: hidden states must not stay on the card."""
        self._seen, self._trouble = {}, None
