"""A roll-out whose replicas do what a test tells them to."""

from __future__ import annotations

from tournant.cluster.weights_rollout import Order, Phase, Report, Rollout, RolloutConfig, Status, Weights


class FakeRollout:
    """`WeightsService` over the real core, with replicas "a", "b", ... that change when `turn` is called."""

    def __init__(self, num_replicas: int = 2) -> None:
        self.core = Rollout("old", RolloutConfig(), 0, settling=False)
        self.error: Exception | None = None
        self.asked: list[tuple[str | None, str]] = []
        self.serves: dict[str, Weights] = {}
        self._number = 0
        for name in "abcdefgh"[:num_replicas]:
            self._report(name, Phase.JOINING)
            self.serves[name] = Weights(0, "old", "", "1" * 64)
            self._report(name, Phase.SERVING)

    async def update(self, model: str | None, tag: str) -> int:
        if self.error is not None:
            raise self.error
        self.asked.append((model, tag))
        return self.core.update(0, model, tag)

    async def status(self) -> Status:
        if self.error is not None:
            raise self.error
        return self.core.status(0)

    def turn(self, failure: str = "") -> None:
        """Whose turn it is changes, or says why it cannot; then those that serve the target call it by its epoch."""
        for name in self.serves:
            order = self._report(name, Phase.SERVING)
            target = order.weights
            if order.action == "change" and target is not None:
                self._report(name, Phase.CHANGING, changing_to=target.epoch)
                if failure:
                    self._report(name, Phase.SERVING, failed=target.epoch, failure=failure)
                else:
                    self.serves[name] = Weights(target.epoch, target.model, target.tag, "2" * 64)
                    self._report(name, Phase.SERVING)
                break
        for name in self.serves:
            order = self._report(name, Phase.SERVING)
            if order.action == "stay" and order.weights is not None:
                self.serves[name] = order.weights

    def _report(self, name: str, phase: Phase, changing_to: int = 0, failed: int = 0, failure: str = "") -> Order:
        self._number += 1
        return self.core.hear(0, Report(name, self._number, phase, self.serves.get(name), changing_to, failed, failure))
