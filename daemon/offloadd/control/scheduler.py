"""Which waiting job runs next: a pure queue, to which time is handed in.

The rule, in this order:
1. Only jobs whose model can be run now take part.
2. The highest priority goes first.
3. Jobs on the model that is in memory are preferred, but no longer than `model_turn_s` after its
   turn began while jobs on other models wait; then the longest waiting of the others is next. So
   A B A B runs as A A B B, and a model waits at most one turn for each other model before it.
4. Among what is left, the client that was served longest ago, and of its jobs the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from offload_protocol.errors import Busy

MAX_REMEMBERED_CLIENTS = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job in the queue. `client` is who takes turns with others; `size_bytes` its request's."""

    job: str
    client: str
    model: str
    submitted_s: float
    priority: int = 0
    deadline_s: float | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the queue may hold, and how long a model may be preferred."""

    limit: int
    per_client_limit: int
    max_bytes: int
    model_turn_s: float


class Scheduler:
    """The queue of one device."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._waiting: dict[str, Ticket] = {}
        self._served: dict[str, int] = {}
        self._serves = 0
        self._model: str | None = None
        self._model_since_s = 0.0
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: str) -> bool:
        return job in self._waiting

    def add(self, ticket: Ticket, retry_after_s: float) -> None:
        """Queue a job; raises `Busy`, with `retry_after_s` for the client, where there is no room.

        An empty queue takes a request of any size.
        """
        of_client = sum(other.client == ticket.client for other in self._waiting.values())
        full = ""
        if len(self._waiting) >= self._bounds.limit:
            full = f"{len(self._waiting)} jobs wait already"
        elif of_client >= self._bounds.per_client_limit:
            full = f"{of_client} jobs of this client wait already"
        elif self._waiting and self._waiting_bytes + ticket.size_bytes > self._bounds.max_bytes:
            full = f"the requests that wait hold {self._waiting_bytes} bytes already"
        if full:
            raise Busy(
                f"the queue is full: {full}",
                hint=f"try again in {retry_after_s:.0f} s",
                details={"retry_after_s": retry_after_s, "depth": len(self._waiting)},
            )
        self._waiting[ticket.job] = ticket
        self._waiting_bytes += ticket.size_bytes

    def remove(self, job: str) -> bool:
        """Take a job out; False where it does not wait."""
        ticket = self._waiting.pop(job, None)
        if ticket is not None:
            self._waiting_bytes -= ticket.size_bytes
        return ticket is not None

    def expired(self, now_s: float) -> list[str]:
        """The jobs whose time to wait is over; they still wait until they are removed."""
        return [
            ticket.job
            for ticket in self._waiting.values()
            if ticket.deadline_s is not None and ticket.deadline_s <= now_s
        ]

    def model_left(self, model: str) -> None:
        """The model is no longer in memory, so nothing is gained by preferring it."""
        if self._model == model:
            self._model = None

    def client_left(self, client: str) -> None:
        """Forget whose turn was when, for a client that will not ask again."""
        self._served.pop(client, None)

    def start_next(self, now_s: float, runnable: Callable[[str], bool]) -> Ticket | None:
        """Take out the job that runs now, or None; `runnable` says it of a model."""
        candidates = [ticket for ticket in self._waiting.values() if runnable(ticket.model)]
        if not candidates:
            return None
        highest = max(ticket.priority for ticket in candidates)
        models = _by_model(ticket for ticket in candidates if ticket.priority == highest)
        model = _next_model(models, self._preferred(now_s), self._model)
        ticket = min(models[model], key=lambda one: _turn(one, self._served))
        self.remove(ticket.job)
        self._note_served(ticket.client)
        if model != self._model:
            self._model, self._model_since_s = model, now_s
        return ticket

    def _note_served(self, client: str) -> None:
        self._serves += 1
        self._served.pop(client, None)
        self._served[client] = self._serves
        # Clients that left before their last job was served would stay here for ever.
        if len(self._served) > MAX_REMEMBERED_CLIENTS:
            del self._served[next(iter(self._served))]

    def order(self, now_s: float) -> list[str]:
        """The waiting jobs in the order in which they would start if all started now."""
        order: list[str] = []
        served, preferred, current = dict(self._served), self._preferred(now_s), self._model
        for priority in sorted({one.priority for one in self._waiting.values()}, reverse=True):
            models = _by_model(one for one in self._waiting.values() if one.priority == priority)
            while models:
                model = _next_model(models, preferred, current)
                if model != current:
                    preferred = current = model
                order += _taking_turns(models.pop(model), served, self._serves + len(order))
        return order

    def _preferred(self, now_s: float) -> str | None:
        turn_is_over = now_s - self._model_since_s >= self._bounds.model_turn_s
        return None if turn_is_over else self._model


def _by_model(tickets: Iterable[Ticket]) -> dict[str, list[Ticket]]:
    models: dict[str, list[Ticket]] = {}
    for ticket in tickets:
        models.setdefault(ticket.model, []).append(ticket)
    return models


def _next_model(models: dict[str, list[Ticket]], preferred: str | None, current: str | None) -> str:
    if preferred in models:
        return preferred
    others = [model for model in models if model != current] or list(models)
    return min(others, key=lambda model: min(one.submitted_s for one in models[model]))


def _turn(ticket: Ticket, served: dict[str, int]) -> tuple[int, float]:
    return served.get(ticket.client, 0), ticket.submitted_s


def _taking_turns(tickets: list[Ticket], served: dict[str, int], serves: int) -> list[str]:
    # A heap of each client's oldest ticket: the positions of a full queue are asked for often.
    clients: dict[str, deque[Ticket]] = {}
    for ticket in sorted(tickets, key=lambda one: one.submitted_s):
        clients.setdefault(ticket.client, deque()).append(ticket)
    heads = [(*_turn(queue[0], served), client) for client, queue in clients.items()]
    heapify(heads)
    order = []
    while heads:
        client = heads[0][2]
        order.append(clients[client].popleft().job)
        served[client] = serves = serves + 1
        if clients[client]:
            heapreplace(heads, (*_turn(clients[client][0], served), client))
        else:
            heappop(heads)
    return order
