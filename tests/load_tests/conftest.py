"""Lets the tests import locust without its patches to the standard library, which are for a process of its own."""

import os

os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"
