"""What an engine does for us, whichever it is: the front end, the allow-list, the self-test, the refresh, who sampled what.

Called by the trainer's room through a link; the front end runs in the process that owns the engine, the refresh in its workers.
What imports vLLM is in ``vllm``.
"""
