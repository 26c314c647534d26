from tests.client.conftest import cancel_log, toy, unused_address  # noqa: F401
