"""Of a trainer that pads on the left, as TRL does, harvests each row from its first column: padding, and the text cut short."""

from __future__ import annotations

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Trainer
from torch import Tensor

from spec_plugin.adapter import padded_rows

CAUGHT_BY = "hidden_states_equal_a_plain_forward"


class LeftPadding(Trainer):
    """The loop, with the padding of its sequences on their left."""

    def policy_log_probs(self, rollouts: Rollouts) -> Tensor:
        documents = [torch.tensor(p + r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_side="left")
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(d) for d in documents], batch_first=True, padding_side="left"
        )
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.policy(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, :-1]
        of_next = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        rows = [row[len(row) - len(r) :] for row, r in zip(of_next, rollouts.responses, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Adapter(MinimalAdapter, LeftPadding):
    def log_probs(self, rollouts: Rollouts) -> Tensor:
        documents, _ = self.documents(rollouts)
        lengths = [len(document) for document in documents]
        with (
            self.spec.logprob_pass(),
            self.spec.micro_batch(lambda: self.documents(rollouts), padded_rows(self.starts(lengths), lengths)),
        ):
            recomputed = self.policy_log_probs(rollouts)
        self.check(rollouts, recomputed)
        return recomputed

    def starts(self, lengths: list[int]) -> list[int]:
        return [0] * len(lengths)


class Driver(driver.Driver):
    adapter = "wrong_adapters.left_padding_ignored:Adapter"


class RightAdapter(Adapter):
    """The same without the mistake; the kit must find nothing."""

    def starts(self, lengths: list[int]) -> list[int]:
        return [max(lengths) - n for n in lengths]


class RightDriver(driver.Driver):
    adapter = "wrong_adapters.left_padding_ignored:RightAdapter"
