"""For all tests."""

from __future__ import annotations

import signal

import pytest

pytest.register_assert_rewrite("tests.served_traces")

# A shell's background job, as this may be one, ignores Ctrl-C, and what it starts inherits that. Said here once: saying
# it in each child (`preexec_fn`) forks this process, in which Ray's threads may be inside gRPC just then.
signal.signal(signal.SIGINT, signal.default_int_handler)
