"""The conformance kit: contract tests that any adapter must pass, against its real trainer and a real engine."""
