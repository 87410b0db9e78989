"""What a rollout server counts about itself, beside what vLLM counts, as Prometheus reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_grpo.servers.serve_app import App

PREFIX = "megatron_grpo_server_"


class Metrics:
    """Numbers on prometheus_client's own registry, where vLLM's are."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.pushes = Counter(PREFIX + "pushes", "Pushes of weights and adapters.", ["kind", "outcome"])
        self.push_seconds = Gauge(PREFIX + "last_push_seconds", "From the call of the last push that came whole to its answer.")
        self.refusals = Counter(PREFIX + "refusals", "Answers that were not 200.", ["status"])
        self.answered = Counter(PREFIX + "answered", "Requests for completions, by how they ended.", ["outcome"])
        self._version = Gauge(PREFIX + "version", "Version of the weights; -1: none.")
        self._running = Gauge(PREFIX + "running_requests", "Requests for completions that are being answered.")

    def watch(self, app: App) -> None:
        """The gauges say what is so when they are read."""
        self._version.set_function(lambda: -1 if app.ownership.version is None else app.ownership.version)
        self._running.set_function(lambda: app.running)

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest()
