"""Which request is preempted: for a running request that lacks a block, and for a tenant that waits for its share.

Both choose the latest request of the tenant that holds most for its weight, and neither the running request that
arrived first, which therefore always comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterable

from dflash_backend.core.request import Request
from dflash_backend.core.tenants import Tenant


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
    chosen: tuple[float, int, Request] | None = None
    for other in tenants:
        if other is tenant or other.service < most or (victim := other.latest(but=oldest)) is None:
            continue
        if num_blocks:
            left = (other.num_blocks - len(victim.block_ids)) / other.weight
            then = (tenant.num_blocks + num_blocks) / tenant.weight
        else:
            left = (len(other.running) - 1) / other.weight
            then = (len(tenant.running) + 1) / tenant.weight
        if left >= then and (chosen is None or (left, victim.arrival) > chosen[:2]):
            chosen = left, victim.arrival, victim
    return None if chosen is None else chosen[2]
