"""The scenarios, a file each. A new one is a file with a `SCENARIO` and a line here."""

from load_tests.scenario import Scenario
from load_tests.scenarios import (
    burst,
    cancel_heavy,
    chat,
    fleet,
    interference,
    long_context,
    mixed_lengths,
    overload,
    shared_prefix,
    soak,
    tenants,
)

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (
        shared_prefix,
        chat,
        mixed_lengths,
        burst,
        cancel_heavy,
        long_context,
        overload,
        interference,
        tenants,
        fleet,
        soak,
    )
}
