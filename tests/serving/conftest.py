"""The fixtures of `conftest_serving`, which the tests also import from."""

from conftest_serving import classifier, server  # noqa: F401
