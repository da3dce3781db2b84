"""Simulated runs with known truth: how often each guard speaks up in correct ones, and how soon in wrong ones.

``make guards`` runs them all and prints the tables of docs/guards.md and docs/explain/controller.md;
``tests/unit/simulators/test_simulators.py`` runs a few of each. What is simulated is what trainers and engines do, and not what
our code expects: see each module.
"""
