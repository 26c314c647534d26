"""Who waits, by tenant, and whose turn it is: the weighted fair queue that the scheduler admits from.

Every tenant has a counter of the service it got: tokens that were run for it, divided by its weight. The tenant with
the lowest counter goes first (the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). A tenant without requests gains no claim by that: a tenant that comes, or comes back, starts from the
lowest counter of those that are there, or from its own where that is higher. Within a tenant the order is priority,
then arrival.

Every operation costs O(log n) in tenants and in the tenant's waiting requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dflash_backend.core.request import Request

# A token that is found in the prefix cache costs its tenant this part of one that is computed.
CACHED_TOKEN_COST = 1 / 32
# Tenants without a request whose counters are kept, the last to leave.
MAX_ABSENT = 1024


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant that has requests. `service` is its counter: tokens divided by `weight`. `number` counts the tenants
    as they come. Of equal counters the newest goes first: it has nothing yet, and the others go on."""

    name: str
    weight: float
    number: int
    service: float
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    running: dict[str, Request] = field(default_factory=dict)
    # Waiting requests, a heap by rank. Those that were aborted stay until they come to its top.
    queue: list[tuple[tuple[int, int], Request]] = field(default_factory=list)
    has_turn: bool = False

    @property
    def turn(self) -> tuple[float, int]:
        """What the tenants are ordered by."""
        return self.service, -self.number

    def charge(self, num_tokens: float) -> None:
        """Count tokens that were run for this tenant."""
        self.service += num_tokens / self.weight

    @property
    def num_blocks(self) -> int:
        """KV blocks that its running requests hold; one that several share counts for each."""
        return sum(len(request.block_ids) for request in self.running.values())

    def latest(self, but: Request | None = None) -> Request | None:
        """The running request that comes last in the tenant's order; `but` is left out."""
        rest = (request for request in self.running.values() if request is not but)
        return max(rest, key=lambda request: request.rank, default=None)


@dataclass(slots=True)
class _Aside:
    """Requests of one tenant that wait outside the queue, and their tokens."""

    num_requests: int = 0
    num_tokens: int = 0


class FairQueue:
    """The waiting requests and the tenants that have any request, waiting or running. Requests that wait outside of it,
    for a grammar or for KV, are counted too: the bounds of the queue hold for them."""

    def __init__(self, weights: Mapping[str, float], crowd: int = 0) -> None:
        """`weights` by tenant, 1 for the others. `crowd` waiting requests and more make a tenant crowded."""
        self._weights = weights
        self._crowd = crowd
        # How many requests wait of each tenant that is crowded.
        self.crowded: dict[str, int] = {}
        self.waiting: dict[str, Request] = {}
        self.num_waiting_tokens = 0
        self._aside: dict[str, _Aside] = {}
        self.num_aside = self.num_aside_tokens = 0
        """Requests that wait outside, and their tokens."""
        self.tenants: dict[str, Tenant] = {}
        # Those of them that have running requests.
        self.running_tenants: dict[str, Tenant] = {}
        # The tenants that wait, by counter: each once, perhaps under a counter that has grown since.
        self._turns: list[tuple[float, int, Tenant]] = []
        self._num_joined = 0
        # The lowest counter of those that had requests when this was last looked at.
        self._lowest = 0.0
        self.was_charged = False
        """Whether a step was charged since then."""
        self._absent: OrderedDict[str, float] = OrderedDict()
        self.num_left = 0
        """How often a tenant's last request ended while others had some."""

    def tenant_of(self, request: Request) -> Tenant:
        """The tenant of a request that waits or runs."""
        return self.tenants[request.sampling.tenant]

    def num_waiting_of(self, name: str) -> tuple[int, int]:
        """How many requests of a tenant wait, here or outside, and how many tokens they have."""
        tenant, aside = self.tenants.get(name), self._aside.get(name)
        num_requests, num_tokens = (0, 0) if aside is None else (aside.num_requests, aside.num_tokens)
        if tenant is not None:
            num_requests, num_tokens = num_requests + tenant.num_waiting, num_tokens + tenant.num_waiting_tokens
        return num_requests, num_tokens

    def set_aside(self, request: Request, sign: int = 1) -> None:
        """Count a request that waits outside, until `take_back`."""
        name, num_tokens = request.sampling.tenant, sign * request.num_tokens
        aside = self._aside.setdefault(name, _Aside())
        aside.num_requests += sign
        aside.num_tokens += num_tokens
        self.num_aside += sign
        self.num_aside_tokens += num_tokens
        if not aside.num_requests:
            del self._aside[name]
        self._count_crowd(name)

    def take_back(self, request: Request) -> None:
        """A request waits outside no more."""
        self.set_aside(request, -1)

    def num_prompting(self, in_prefill: Iterable[Request]) -> int:
        """Tenants that have prompts to compute, waiting ones or those of `in_prefill`, the running ones."""
        names = {request.sampling.tenant for request in in_prefill}
        return len(names) + sum(tenant.num_waiting > 0 and name not in names for name, tenant in self.tenants.items())

    @property
    def least_waiting(self) -> int:
        """How many requests wait of the tenant with the fewest; 0 without tenants."""
        return min((tenant.num_waiting for tenant in self.tenants.values()), default=0)

    def add(self, request: Request) -> None:
        """Let a request wait: a new one, or one that was preempted, which gets its place back."""
        tenant = self._join(request.sampling.tenant)
        self.waiting[request.request_id] = request
        heapq.heappush(tenant.queue, (request.rank, request))
        tenant.num_waiting += 1
        tenant.num_waiting_tokens += request.num_tokens
        self.num_waiting_tokens += request.num_tokens
        self._count_crowd(tenant.name)
        self.put_back(tenant)

    def start(self, request: Request) -> None:
        """The first waiting request of a tenant runs now."""
        tenant = self.tenant_of(request)
        if self.head(tenant) is not request:
            raise ValueError(f"request '{request.request_id}' is not the first of its tenant")
        heapq.heappop(tenant.queue)
        self._take_out(request)
        tenant.running[request.request_id] = request
        self.running_tenants[tenant.name] = tenant

    def stop(self, request: Request) -> None:
        """A request that ran does so no longer. It may be added again."""
        tenant = self.tenant_of(request)
        del tenant.running[request.request_id]
        if not tenant.running:
            del self.running_tenants[tenant.name]
            self._leave_if_idle(tenant)

    def discard(self, request: Request) -> None:
        """A request that waited was given up."""
        self._leave_if_idle(self._take_out(request))

    def head(self, tenant: Tenant) -> Request:
        """The first waiting request of a tenant that has one."""
        queue = tenant.queue
        while self.waiting.get(queue[0][1].request_id) is not queue[0][1]:
            heapq.heappop(queue)
        return queue[0][1]

    def next_turn(self) -> Tenant | None:
        """Take out the waiting tenant with the lowest counter; `put_back` puts it in again."""
        while self._turns:
            service, _, tenant = heapq.heappop(self._turns)
            tenant.has_turn = False
            if tenant.num_waiting == 0 or self.tenants.get(tenant.name) is not tenant:
                continue
            if service == tenant.service:
                return tenant
            self.put_back(tenant)
        return None

    def shorter(self, than: Tenant, num_tokens: int) -> list[Tenant]:
        """The tenants whose first request that waits has at most `num_tokens`, and that will have been served less with
        it than a tenant that comes before them with its own, those first that will have been least. Such a request does
        not wait for the long ones of many others."""
        most = than.service + self.head(than).num_tokens / than.weight
        found = []
        for tenant in self.tenants.values():
            if tenant.num_waiting and tenant is not than:
                num_first = self.head(tenant).num_tokens
                served = tenant.service + num_first / tenant.weight
                if num_first <= num_tokens and served < most:
                    found.append((served, tenant.number, tenant))
        return [tenant for _, _, tenant in sorted(found, key=lambda each: each[:2])]

    def put_back(self, tenant: Tenant) -> None:
        """Let a tenant that waits have its turn."""
        if tenant.num_waiting and not tenant.has_turn:
            if len(self._turns) > 2 * len(self.tenants) + 16:  # of tenants that have left
                self._turns = [entry for entry in self._turns if self.tenants.get(entry[2].name) is entry[2]]
                heapq.heapify(self._turns)
            heapq.heappush(self._turns, (*tenant.turn, tenant))
            tenant.has_turn = True

    def _find_lowest(self, leaving: Tenant | None = None) -> None:
        """Find the lowest counter of those that had requests when the last step was charged: only when a tenant comes,
        or leaves, and not after each step. It never decreases."""
        if not self.was_charged:
            return
        self.was_charged = False
        first = self.next_turn()
        counters = [tenant.service for tenant in self.running_tenants.values()]
        if first is not None:
            self.put_back(first)
            counters.append(first.service)
        if leaving is not None:
            counters.append(leaving.service)
        self._lowest = max(self._lowest, min(counters, default=0.0))

    def _join(self, name: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            self._find_lowest()
            service = max(self._lowest, self._absent.pop(name, 0.0))
            tenant = Tenant(name, self._weights.get(name, 1.0), self._num_joined, service)
            self._num_joined += 1
            self.tenants[name] = tenant
        return tenant

    def _take_out(self, request: Request) -> Tenant:
        del self.waiting[request.request_id]
        tenant = self.tenant_of(request)
        tenant.num_waiting -= 1
        tenant.num_waiting_tokens -= request.num_tokens
        self.num_waiting_tokens -= request.num_tokens
        self._count_crowd(tenant.name)
        if len(tenant.queue) > 2 * tenant.num_waiting + 16:
            waiting = self.waiting
            tenant.queue = [entry for entry in tenant.queue if waiting.get(entry[1].request_id) is entry[1]]
            heapq.heapify(tenant.queue)
        return tenant

    def _count_crowd(self, name: str) -> None:
        num_waiting, _ = self.num_waiting_of(name)
        if num_waiting and num_waiting >= self._crowd:
            self.crowded[name] = num_waiting
        else:
            self.crowded.pop(name, None)

    def _leave_if_idle(self, tenant: Tenant) -> None:
        """Let a tenant go that has no request. What it had more than others is kept against it while others are
        there."""
        if tenant.num_waiting or tenant.running:
            return
        self._find_lowest(leaving=tenant)
        del self.tenants[tenant.name]
        if not self.tenants:
            self._lowest = max(self._lowest, tenant.service)
            self._absent.clear()
            self._turns.clear()
            return
        self.num_left += 1
        self._absent[tenant.name] = tenant.service
        if len(self._absent) > MAX_ABSENT:
            self._absent.popitem(last=False)


def latest_of_heaviest(tenants: Iterable[Tenant], oldest: Request) -> Request:
    """The request to preempt so that another one that runs gets blocks; there must be one but `oldest`."""
    candidates = [(tenant, request) for tenant in tenants if (request := tenant.latest(but=oldest)) is not None]
    if len(candidates) == 1:
        return candidates[0][1]
    _, request = max(candidates, key=lambda one: (one[0].num_blocks / one[0].weight, one[1].arrival))
    return request


def request_to_make_way(
    tenant: Tenant, num_blocks: int, tenants: Iterable[Tenant], oldest: Request, min_lag: float
) -> Request | None:
    """The request to preempt so that `tenant` can start one: it waits for a row (`num_blocks` 0) or for blocks.

    None unless another tenant got no less service, and still holds as much for its weight afterwards as `tenant` does
    then. So a preempted request does not take it back the same way, and a tenant's only request is never preempted.
    When `tenant` runs already, its service must be `min_lag` behind, or two tenants would preempt each other by turns.
    """
    most = tenant.service + (min_lag if tenant.running else 0.0)
    if num_blocks:
        then = (tenant.num_blocks + num_blocks) / tenant.weight
    else:
        then = (len(tenant.running) + 1) / tenant.weight
    chosen: tuple[float, int, Request] | None = None
    for other in tenants:
        if other is tenant or other.service < most:
            continue
        # Asked before the tenant's requests are looked at: few tenants have so much. Of blocks it is an upper bound.
        left = other.num_blocks / other.weight if num_blocks else (len(other.running) - 1) / other.weight
        if left < then or (victim := other.latest(but=oldest)) is None:
            continue
        if num_blocks:
            left = (other.num_blocks - len(victim.block_ids)) / other.weight
        if left >= then and (chosen is None or (left, victim.arrival) > chosen[:2]):
            chosen = left, victim.arrival, victim
    return None if chosen is None else chosen[2]
