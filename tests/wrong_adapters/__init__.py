"""Adapters with one mistake each, which the conformance kit must find: ``PYTHONPATH=tests spec-plugin conformance
wrong_adapters.<module>:Driver``.

Each module's ``CAUGHT_BY`` is the name of the check that is meant for its mistake. The adapter that they spoil is
examples/minimal_adapter, which must be importable too.
"""
