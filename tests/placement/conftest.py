from tests.attention.conftest import restore_threads, single_threaded_oracle  # noqa: F401
