"""Tests of the frontend, without Triton."""
