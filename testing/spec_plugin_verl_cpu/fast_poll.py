"""A replay buffer that looks for finished rollouts 50 times a second, and hands them out in the order of their prompts.

verl's own looks every 2 seconds, and no option changes that: nothing beside rollouts of minutes, but a small run would show
generation times of 2, 4, 6 … seconds. It hands rollouts out as they finish, which is another order in each run; recorded ones
(``skip.rollout_tq``) come in that of their record. In the prompts' order, a run on fresh rollouts and one on their record
train to the same bits. Used through verl's extension point ``trainer.v1.sampler.custom_sampler``.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class _InOrder:
    """Mixed into a replay buffer of verl: a short poll interval, and the prompts' order."""

    prompt_global_steps: dict[str, dict[str, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": 0.02})

    def _materialize_batch(self, partition_id: str, selected: list[str], snapshot: dict[str, dict[str, Any]]) -> Any:
        place = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}

        def order(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")  # session of the prompt, output of the session
            return place.get(uid, -1), *map(int, numbers)

        ordered = {key: snapshot[key] for key in sorted(snapshot, key=order)}
        return super()._materialize_batch(partition_id, selected, ordered)  # type: ignore[misc]


class FastPoll(_InOrder, ReplayBuffer):  # type: ignore[misc]
    """verl's replay buffer for ``trainer_mode=sync``, polled every 20 ms, in the prompts' order."""


class FastPollAsync(_InOrder, ReplayBufferAsync):  # type: ignore[misc]
    """The same for verl's asynchronous modes."""
