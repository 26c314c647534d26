"""All defects that the tests must notice, each a replacement of text."""

from __future__ import annotations

from tests.mutations import drafters, noticed, planted
from tests.mutations.core import CACHE_MUTANTS, FAILED_STEPS_MUTANTS, INVARIANTS_MUTANTS, SPEC_COUNTS_MUTANTS
from tests.mutations.mutant import Mutant
from tests.mutations.overlap import OVERLAP_MUTANTS, SHORT_REQUESTS_MUTANTS
from tests.mutations.scheduling import SCHEDULER_MUTANTS, TENANTS_MUTANTS

_CORE = INVARIANTS_MUTANTS + CACHE_MUTANTS + SCHEDULER_MUTANTS + TENANTS_MUTANTS + OVERLAP_MUTANTS
_CORE += SHORT_REQUESTS_MUTANTS + FAILED_STEPS_MUTANTS + SPEC_COUNTS_MUTANTS
MUTANTS: tuple[Mutant, ...] = _CORE + planted.PLANTED + noticed.NOTICED + drafters.DRAFTERS

# Every run of the tests applies these: of the invariants, the cache, the scheduler, overlap, and of `planted`.
SMOKE = (
    "RESERVE: lookahead of k instead of k + 1",
    "PUBLISH: the last full block of a hit is dropped",
    "protected blocks never grow old",
    "the oldest request is preempted",
    "a result goes to whoever has the id now",
    *planted.SMOKE,
)
