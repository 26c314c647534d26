"""Puts known defects back into a copy of the source and shows that the tests notice: `make mutants`."""
