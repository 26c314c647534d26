"""Load tests: locust users, scenarios that check every answer, and verdicts. See docs/load-testing.md.

`python -m load_tests list` names the scenarios; `make load SCENARIO=...` runs one.
"""
