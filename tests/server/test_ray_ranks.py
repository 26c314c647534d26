"""A target that two nodes of a Ray cluster share, through Triton: a node is lost under load, and comes back."""

from __future__ import annotations

import tempfile

import pytest

from checks import ray_ranks
from checks.ray_nodes import RayNodes


@pytest.mark.nightly
@pytest.mark.slow
def test_answers_are_those_of_one_process_and_a_lost_node_is_an_engine_that_is_replaced(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="left-") as directory, RayNodes() as nodes:
        monkeypatch.setattr("tempfile.tempdir", directory)
        assert ray_ranks.check(nodes, 1, "stop", 4, directory)
