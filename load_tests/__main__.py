"""`python -m load_tests`. Makes sockets, threads and gRPC cooperate with gevent, on which locust runs its users."""

import sys

# Not in the process that computes the expected answers, which imports this file too.
if __name__ == "__main__":
    try:
        from gevent import monkey
    except ImportError:
        print("load_tests: locust is missing; install it with: pip install -e '.[load]'", file=sys.stderr)
        sys.exit(2)
    # Before anything else imports sockets or threads.
    monkey.patch_all()
    from grpc.experimental.gevent import init_gevent

    init_gevent()

    from load_tests.cli import main

    sys.exit(main())
